"""Monarch RDMA: a buffer is read whole, so what arrives is cut where the buffers end. (Reads: test_matrix.py.)"""

import torch

from meshrl.weights.host import HostProcess
from meshrl.weights.rdma import RdmaHandle, RdmaLink
from meshrl.weights.wire import Piece, Stretch


def test_pieces_that_lie_on_across_the_end_of_a_stretch_are_read_from_both() -> None:
    landing = torch.zeros(48)
    pieces = [Piece(64 * n, torch.float32, landing[16 * n : 16 * n + 16]) for n in range(3)]
    handle = RdmaHandle((Stretch(0, 128), Stretch(128, 64)), ())
    link = RdmaLink(handle, HostProcess.current(), pieces)
    assert [(number, into.numel()) for number, into in link._into] == [(0, 128), (1, 64)]
