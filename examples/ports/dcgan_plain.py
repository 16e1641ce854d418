"""A DCGAN on small images of discs, in the manner of PyTorch's DCGAN example.

The images are made here, so that nothing is downloaded: one soft disc each, anywhere, of any size.
"""

import argparse

import torch
from torch import nn, optim
from torch.utils.data import DataLoader, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--batch-size", type=int, default=48, help="input batch size")
parser.add_argument("--niter", type=int, default=3, help="number of epochs to train for")
parser.add_argument("--nz", type=int, default=32, help="size of the latent z vector")
parser.add_argument("--ngf", type=int, default=16)
parser.add_argument("--ndf", type=int, default=16)
parser.add_argument("--lr", type=float, default=0.0002, help="learning rate")
parser.add_argument("--beta1", type=float, default=0.5, help="beta1 for adam")
parser.add_argument("--seed", type=int, default=1, help="manual seed")
opt = parser.parse_args()

torch.manual_seed(opt.seed)
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
nz, ngf, ndf = opt.nz, opt.ngf, opt.ndf


def make_images(count):
    generator = torch.Generator().manual_seed(0)
    x, y, radius = (torch.rand(3, count, 1, 1, 1, generator=generator) * 8 + 4).unbind()
    rows, columns = torch.arange(16.0).view(1, 1, 16, 1), torch.arange(16.0).view(1, 1, 1, 16)
    distance = ((rows - y) ** 2 + (columns - x) ** 2).sqrt()
    return TensorDataset(torch.tanh(radius / 2 - distance))


dataloader = DataLoader(make_images(960), batch_size=opt.batch_size, shuffle=True)


def weights_init(m):
    if isinstance(m, (nn.Conv2d, nn.ConvTranspose2d)):
        nn.init.normal_(m.weight, 0.0, 0.02)
    elif isinstance(m, nn.BatchNorm2d):
        nn.init.normal_(m.weight, 1.0, 0.02)
        nn.init.zeros_(m.bias)


netG = nn.Sequential(
    nn.ConvTranspose2d(nz, ngf * 2, 4, 1, 0, bias=False),
    nn.BatchNorm2d(ngf * 2),
    nn.ReLU(True),
    nn.ConvTranspose2d(ngf * 2, ngf, 4, 2, 1, bias=False),
    nn.BatchNorm2d(ngf),
    nn.ReLU(True),
    nn.ConvTranspose2d(ngf, 1, 4, 2, 1, bias=False),
    nn.Tanh(),
).to(device)
netG.apply(weights_init)

netD = nn.Sequential(
    nn.Conv2d(1, ndf, 4, 2, 1, bias=False),
    nn.LeakyReLU(0.2, inplace=True),
    nn.Conv2d(ndf, ndf * 2, 4, 2, 1, bias=False),
    nn.BatchNorm2d(ndf * 2),
    nn.LeakyReLU(0.2, inplace=True),
    nn.Conv2d(ndf * 2, 1, 4, 1, 0, bias=False),
    nn.Sigmoid(),
    nn.Flatten(0),
).to(device)
netD.apply(weights_init)

criterion = nn.BCELoss()
real_label, fake_label = 1.0, 0.0

optimizerD = optim.Adam(netD.parameters(), lr=opt.lr, betas=(opt.beta1, 0.999))
optimizerG = optim.Adam(netG.parameters(), lr=opt.lr, betas=(opt.beta1, 0.999))

for epoch in range(opt.niter):
    for i, data in enumerate(dataloader):
        # (1) Update D network: maximize log(D(x)) + log(1 - D(G(z)))
        netD.zero_grad()
        # train with real
        real = data[0].to(device)
        output = netD(real)
        errD_real = criterion(output, torch.full_like(output, real_label))
        errD_real.backward()
        D_x = output.mean().item()
        # train with fake
        noise = torch.randn(real.size(0), nz, 1, 1, device=device)
        output = netD(netG(noise).detach())
        errD_fake = criterion(output, torch.full_like(output, fake_label))
        errD_fake.backward()
        D_G_z1 = output.mean().item()
        errD = errD_real + errD_fake
        optimizerD.step()

        # (2) Update G network: maximize log(D(G(z)))
        netG.zero_grad()
        noise = torch.randn(data[0].size(0), nz, 1, 1, device=device)
        output = netD(netG(noise))
        errG = criterion(output, torch.full_like(output, real_label))
        errG.backward()
        D_G_z2 = output.mean().item()
        optimizerG.step()

        if i % 10 == 0:
            print(
                f"[{epoch}/{opt.niter}][{i}/{len(dataloader)}] Loss_D: {errD.item():.4f} Loss_G: {errG.item():.4f} "
                f"D(x): {D_x:.4f} D(G(z)): {D_G_z1:.4f} / {D_G_z2:.4f}"
            )
