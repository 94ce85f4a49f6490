"""Names of tensors that no model has are told as they are, never a crash."""

import pytest

from engine.load.names import from_gguf, from_hf, spelled


@pytest.mark.parametrize("is_gguf", [True, False])
@pytest.mark.parametrize("name", ["logit_scale", "", "a.b", "x.1.y.weight"])
def test_what_is_no_parameter_is_spelled_as_it_is(name: str, is_gguf: bool) -> None:
    assert spelled(name, is_gguf=is_gguf) == name


def test_a_layer_of_thousands_of_digits_is_none_of_ours() -> None:
    assert from_hf(f"model.layers.{'9' * 5000}.self_attn.q_proj.weight") is None
    assert from_gguf(f"blk.{'9' * 5000}.attn_q.weight") is None
