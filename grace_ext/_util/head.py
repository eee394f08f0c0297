"""The numbers in the head of a container, and of sections: bytes and LEB128."""

from ..errors import ContainerError


def varint(number: int) -> bytes:
    """Encode a number as LEB128: 7 bits a byte, least significant first, the top bit set on all but the last byte.

    Args:
        number: 0 or more.

    Returns:
        The bytes, as few as possible.
    """
    if number < 128:
        return bytes((number,))
    out = bytearray()
    while number > 127:
        out.append(number & 127 | 128)
        number >>= 7
    out.append(number)
    return bytes(out)


class HeaderReader:
    """Reads the head of a container or of a section, byte after byte.

    Args:
        head: The first bytes of a buffer; at least the head, if the buffer is what it should be.
    """

    def __init__(self, head: bytes):
        self.head = head
        self.at = 0

    def byte(self, what: str) -> int:
        """Read one byte.

        Args:
            what: What it is, for the message of an error.

        Returns:
            The byte, 0 to 255.

        Raises:
            ContainerError: The head ends before it.
        """
        if self.at >= len(self.head):
            raise ContainerError(f"the buffer ends before {what}")
        self.at += 1
        return self.head[self.at - 1]

    def varint(self, what: str) -> int:
        """Read a number of at most 5 bytes in LEB128.

        Args:
            what: What it is, for the message of an error.

        Returns:
            The number, below 2**32.

        Raises:
            ContainerError: The head ends before it, the number is too large, or it is not in its shortest form.
        """
        head, at, number = self.head, self.at, 0
        for shift in range(0, 35, 7):
            if at >= len(head):
                raise ContainerError(f"the buffer ends before {what}")
            byte = head[at]
            at += 1
            number |= (byte & 127) << shift
            if byte < 128:
                if (byte == 0 and shift) or number >= 2**32:
                    break
                self.at = at
                return number
        raise ContainerError(f"{what} is not a varint below 2**32 in its shortest form")
