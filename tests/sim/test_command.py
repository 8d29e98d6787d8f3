"""`flykernels sim` with what a user may get wrong: one line that says what, exit code 2, never a traceback."""

import numpy as np
import pytest
from click.testing import CliRunner

from flykernels.sim.cli import parse_argument, sim

from .asm_kernel import kernel


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    made = tmp_path_factory.mktemp("sim") / "k.s"
    made.write_text(kernel("s_nop 0", arguments="pi"))
    return made


def refused(*words: str) -> str:
    done = CliRunner().invoke(sim, [*map(str, words)])
    assert done.exit_code == 2 and isinstance(done.exception, SystemExit), repr(done.exception)
    return done.output


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--args", "u32[4]", "300:u8"], "300"),
        (["--args", "-1", "7"], "no address"),
        (["--args", "u32[4]", "1e60"], "largest float"),
        (["--args", "u32[4]", "@missing.npy"], "missing.npy"),
        (["--args", "u8[999999999999999]", "1"], "999999999999999"),
        (["--args", "u32[4]", "7", "--grid", "1000000000"], "2^32"),
        (["--args", "u32[4]", "7", "--grid", "-1"], "grid"),
        (["--args", "u32[4]", "7", "--shared", "-4"], "negative"),
        (["--args", "u32[4]", "7", "--workgroup", "3"], "not in the grid"),
        (["--args", "u32[4]", "7", "--output", "5"], "not a buffer"),
        (["--args", "u32[4]", "7", "--timeline", "t.pdf"], ".svg"),
        (["--args", "u32[4]", "7", "--grid", "0", "--profile"], "workgroup"),
        (["--args", "u32[4]", "7", "--waive", "nothing"], "unknown kind"),
    ],
    ids=lambda x: " ".join(x) if isinstance(x, list) else "",
)
def test_bad_words(file, words, message):
    assert message in refused(file, *words)


def test_a_word_is_named_once():
    assert refused("k.s", "--args", "u32[2*2]").count("u32[2*2]") == 1


def test_bad_files(tmp_path):
    for name, data in {
        "empty": b"", "text": b"hello\n", "zip": b"PK\x03\x04" + bytes(99), "elf": b"\x7fELF" + bytes(60),
        "object": b"flykernels code object 1\n{", "binary": bytes(range(256)),
    }.items():  # fmt: skip
        (tmp_path / name).write_bytes(data)
        assert "error: " in refused(tmp_path / name)
    (tmp_path / "empty.npy").write_bytes(b"")
    (tmp_path / "k.s").write_text(kernel("s_nop 0"))
    assert "empty.npy" in refused(tmp_path / "k.s", "--args", f"@{tmp_path / 'empty.npy'}")


def test_a_bf16_value_is_a_number_and_not_its_bits():
    assert parse_argument("1.5:bf16") == np.uint16(0x3FC0) and parse_argument("7:bf16") == np.uint16(0x40E0)
