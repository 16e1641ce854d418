"""A convolutional net on small images of ten classes, in the manner of PyTorch's MNIST example.

The images are made here, so that nothing is downloaded: ten fixed patterns, shifted and noisy.
"""

import argparse

import paceline
import torch
import torch.nn.functional as F
from torch import nn, optim
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, TensorDataset

run = paceline.init()
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 8, 3)
        self.conv2 = nn.Conv2d(8, 16, 3)
        self.dropout1 = nn.Dropout(0.25)
        self.dropout2 = nn.Dropout(0.5)
        self.fc1 = nn.Linear(16 * 12 * 12, 64)
        self.fc2 = nn.Linear(64, 10)

    def forward(self, x):
        x = F.relu(self.conv1(x))
        x = F.relu(self.conv2(x))
        x = self.dropout1(F.max_pool2d(x, 2))
        x = F.relu(self.fc1(torch.flatten(x, 1)))
        return F.log_softmax(self.fc2(self.dropout2(x)), dim=1)


def make_images(count, seed):
    patterns = torch.randn(10, 1, 7, 7, generator=torch.Generator().manual_seed(0))
    patterns = F.interpolate(patterns, size=28, mode="bilinear", align_corners=False)
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(10, (count,), generator=generator)
    shifts = torch.randint(-4, 5, (count, 2), generator=generator).tolist()
    images = torch.stack([patterns[k].roll(shift, (1, 2)) for k, shift in zip(labels, shifts, strict=True)])
    return TensorDataset(images + 1.5 * torch.randn(images.shape, generator=generator), labels)


def train(args, model, train_loader, optimizer, epoch):
    model.train()
    for batch_idx, _ in enumerate(train_loader):
        for data, target in run.slots():
            data, target = data.to(device), target.to(device)
            output = model(data)
            loss = F.nll_loss(output, target)
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if batch_idx % args.log_interval == 0:
            print(f"Train Epoch: {epoch} [{batch_idx}/{len(train_loader)}]\tLoss: {loss.item():.6f}")


def test(model, test_loader):
    model.eval()
    test_loss = 0
    correct = 0
    with torch.no_grad():
        for data, target in test_loader:
            data, target = data.to(device), target.to(device)
            output = model(data)
            test_loss += F.nll_loss(output, target, reduction="sum").item()
            correct += (output.argmax(dim=1) == target).sum().item()
    count = len(test_loader.dataset)
    print(f"Test set: loss: {test_loss / count:.4f}, Accuracy: {correct}/{count} ({100 * correct / count:.0f}%)")


def main():
    parser = argparse.ArgumentParser(description="PyTorch MNIST-like example")
    parser.add_argument("--batch-size", type=int, default=64, help="input batch size for training")
    parser.add_argument("--test-batch-size", type=int, default=500, help="input batch size for testing")
    parser.add_argument("--epochs", type=int, default=3, help="number of epochs to train")
    parser.add_argument("--lr", type=float, default=1.0, help="learning rate")
    parser.add_argument("--gamma", type=float, default=0.7, help="learning rate step gamma")
    parser.add_argument("--seed", type=int, default=1, help="random seed")
    parser.add_argument("--log-interval", type=int, default=10, help="batches between two lines of training loss")
    args = parser.parse_args()

    torch.manual_seed(args.seed)
    train_loader = DataLoader(make_images(2000, seed=1), batch_size=args.batch_size, shuffle=True)
    test_loader = DataLoader(make_images(1000, seed=2), batch_size=args.test_batch_size)

    model = Net().to(device)
    optimizer = optim.Adadelta(model.parameters(), lr=args.lr)
    scheduler = StepLR(optimizer, step_size=1, gamma=args.gamma)
    run.prepare(model, optimizer, scheduler, train_loader)
    for epoch in run.epochs(args.epochs):
        train(args, model, train_loader, optimizer, epoch)
        test(model, test_loader)
        scheduler.step()


if __name__ == "__main__":
    main()
