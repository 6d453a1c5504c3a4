"""Decoding pictures that others have made."""

import warnings
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from co2.errors import first_line

FORMATS = ("BMP", "GIF", "JPEG", "PNG", "PPM", "TIFF", "WEBP")
"""What is decoded, whatever a file's name says. For others PIL starts programs, or may: PostScript
goes to Ghostscript."""


class BadImage(Exception):
    """A file cannot be used. The message continues a sentence that begins with its name."""


def decode(path: Path) -> Tensor:
    """Decode an image to RGB: uint8 [3, height, width].

    PIL decodes it, because torchvision's own decoder is hardly faster and is about to be removed.

    Raises:
        BadImage: the file cannot be read, is damaged or is not an image.
    """
    from PIL import Image, UnidentifiedImageError

    try:
        with warnings.catch_warnings():  # about odd metadata, which some of a million images have
            warnings.simplefilter("ignore")
            with Image.open(path, formats=FORMATS) as image:
                pixels = np.array(image.convert("RGB"))
    except UnidentifiedImageError:
        raise BadImage("is no picture") from None
    except OSError as error:
        what = "cannot be read" if error.errno else "is damaged"
        raise BadImage(f"{what} ({error.strerror or first_line(error)})") from None
    except Exception as error:  # each of PIL's decoders raises errors of its own
        raise BadImage(f"is damaged ({first_line(error)})") from None
    return torch.from_numpy(pixels).permute(2, 0, 1)
