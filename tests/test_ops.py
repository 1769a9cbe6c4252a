"""Every op of the registry against its own meaning: types, gradient, text, refused operands."""

import numpy as np
import pytest

from euler_ir.builder import Builder, IRError
from euler_ir.op import REGISTRY, result_types
from euler_ir.types import BOOL, DType, TensorType
from runtime.testing import check_inference, check_meaning, check_op, operand_types, sample
from tests.op_cases import CASES, REFUSED
from tests.runners import BACKENDS, backend

NAMES = sorted(name for name, op in REGISTRY.items() if op.__module__.startswith("euler_ir."))


def numbered(table):
    return [pytest.param(item, id=f"{name}-{i}") for name in NAMES
            for i, item in enumerate(table.get(name, []))]


@pytest.mark.parametrize("name", NAMES)
def test_every_op_has_cases_and_a_docstring(name):
    assert CASES.get(name), f"add sample operands of {name} to tests/op_cases.py"
    assert REFUSED.get(name), f"add operands that {name} must refuse to tests/op_cases.py"
    assert not REGISTRY[name].__doc__.startswith(REGISTRY[name].__name__ + "("), "a docstring"


@pytest.mark.parametrize("case", numbered(CASES))
def test_types_text_and_gradient(case):
    check_op(case.op, *case.operands, backends=(), **case.options)


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("case", numbered(CASES))
def test_meaning_on_backends(case, name):
    check_meaning(case.op, sample(case.operands), backend(name), **case.options)


@pytest.mark.parametrize("case", numbered(CASES))
def test_changed_operands_are_refused_in_one_line_or_computed_as_inferred(case):
    """Whatever the operands, infer either refuses them or tells what evaluate gives."""
    arrays = sample(case.operands)
    dtype = case.options.get("dtype", DType.F32)
    for place, changed in changed_operands(arrays):
        types = operand_types(changed, dtype)
        with Builder("changed") as b:
            values = [b.input(f"x{i}", t.dtype, t.shape) for i, t in enumerate(types)]
            try:
                b.apply(case.op, *values)
            except IRError as error:
                message = str(error)
                assert message.startswith(f"{case.op.name}(") and "\n" not in message
                assert "test_ops.py:" in message
                continue
        if place is not None:
            check_inference(case.op, changed, dtype)


def changed_operands(arrays):
    """Operand lists in which one operand has another shape or type, or is missing, or is new."""
    yield None, [*arrays, np.zeros((2, 3))]
    if arrays:
        yield None, arrays[:-1]
    for i, array in enumerate(np.nan_to_num(x, posinf=9.0, neginf=-9.0) for x in arrays):
        longer = np.concatenate([array, array], -1) if array.ndim else np.zeros(2, array.dtype)
        for other in (array[..., None], array[None], longer, np.zeros((0, *array.shape)),
                      np.array(1, array.dtype), array.astype(np.int64), array != 0,
                      np.abs(array).astype(np.float64)):
            yield i, [*arrays[:i], other, *arrays[i + 1:]]


@pytest.mark.parametrize("refused", numbered(REFUSED))
def test_wrong_operands_are_refused(refused):
    op, types, message = refused
    with Builder("wrong") as b:
        values = [b.input(f"x{i}", t.dtype, t.shape) for i, t in enumerate(types)]
        with pytest.raises(IRError) as error:
            b.apply(op, *values)
    text = str(error.value)
    assert message in text
    assert text.startswith(f"{op.name}(") and "test_ops.py:" in text
    assert all(repr(value) in text for value in values)


@pytest.mark.parametrize("name", ["add", "softmax", "matmul", "attention", "full"])
def test_operand_count_is_checked(name):
    op = CASES[name][0].op
    wrong = [TensorType(BOOL, (1,))] * 7
    with pytest.raises(TypeError, match=f"{op.arity} operands?, got bool"):
        result_types(op, wrong)
