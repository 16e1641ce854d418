"""Noise at a server: frames and messages that make no sense. It refuses them, or ends the connection they came by."""


def send_noise(messages, seed): ...
