"""What bytes a token stands for, where its text alone does not tell: parts of characters."""

from functools import cache


def byte_level_bytes(name: str) -> bytes:
    """Of a token of a byte-level tokenizer, by its name in the vocabulary: one character a byte
    (GPT-2's table). A name with other characters stands for itself, as the decoder takes it."""
    table = _bytes_of_characters()
    try:
        return bytes(table[character] for character in name)
    except KeyError:
        return name.encode("utf-8")


def fallback_byte(name: str) -> bytes:
    """Of a byte-fallback token `<0xNN>`."""
    return bytes.fromhex(name[3:5])


@cache
def _bytes_of_characters() -> dict[str, int]:
    """Printable characters of Latin-1 stand for themselves, the other bytes in order for the
    characters from 256 on (`bytes_to_unicode` of GPT-2's encoder.py)."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in plain]
    pairs = [(chr(byte), byte) for byte in plain]
    return dict(pairs + [(chr(256 + n), byte) for n, byte in enumerate(others)])
