"""The text that `mx.fast.metal_kernel` makes around a kernel's body.

test_signature.py compares it with what MLX itself prints.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx

TYPE_NAMES = {
    mx.float32: "float",
    mx.float16: "float16_t",
    mx.bfloat16: "bfloat16_t",
    mx.bool_: "bool",
    mx.int8: "int8_t",
    mx.int16: "int16_t",
    mx.int32: "int32_t",
    mx.int64: "int64_t",
    mx.uint8: "uint8_t",
    mx.uint16: "uint16_t",
    mx.uint32: "uint32_t",
    mx.uint64: "uint64_t",
}

# Inputs with fewer elements are passed in the constant address space.
FEWEST_DEVICE_ELEMENTS = 8

ATTRIBUTES = {
    "dispatch_quadgroups_per_threadgroup": "uint",
    "dispatch_simdgroups_per_threadgroup": "uint",
    "dispatch_threads_per_threadgroup": "uint3",
    "grid_origin": "uint3",
    "grid_size": "uint3",
    "quadgroup_index_in_threadgroup": "uint",
    "quadgroups_per_threadgroup": "uint",
    "simdgroup_index_in_threadgroup": "uint",
    "simdgroups_per_threadgroup": "uint",
    "thread_execution_width": "uint",
    "thread_index_in_quadgroup": "uint",
    "thread_index_in_simdgroup": "uint",
    "thread_index_in_threadgroup": "uint",
    "thread_position_in_grid": "uint3",
    "thread_position_in_threadgroup": "uint3",
    "threadgroup_position_in_grid": "uint3",
    "threadgroups_per_grid": "uint3",
    "threads_per_grid": "uint3",
    "threads_per_simdgroup": "uint",
    "threads_per_threadgroup": "uint3",
}

TemplateValue = mx.Dtype | int | bool


@dataclass(frozen=True)
class Argument:
    """A parameter of the generated kernel.

    Attributes:
        name: As the body knows it.
        space: "device" or "constant".
        type: The element's type.
        reference: A reference to one value instead of a pointer.
        output: Written by the kernel.
        of: For what is passed along with an input: that input, and which of its properties.
    """

    name: str
    space: str
    type: str
    reference: bool = False
    output: bool = False
    of: tuple[str, str] | None = None

    @property
    def declaration(self) -> str:
        mark = "&" if self.reference else "*"
        if self.output:
            return f"device {self.type}{mark} {self.name}"
        return f"const {self.space} {self.type}{mark} {self.name}"


@dataclass(frozen=True)
class Generated:
    """A kernel as MLX compiles it.

    Attributes:
        name: The function's name, unique per template values and ways of passing.
        values: Template values as text, or "".
        text: Header, signature and body; without the line that instantiates a template.
        arguments: Buffers in order of their index.
        attributes: Names of thread attributes, after the buffers.
    """

    name: str
    values: str
    text: str
    arguments: tuple[Argument, ...]
    attributes: tuple[str, ...]

    @property
    def call(self) -> str:
        return self.name + self.values

    @property
    def use(self) -> str:
        """Instantiates a template in plain C++, so that a compiler looks at it."""
        return f"template decltype({self.call}) {self.call};\n" if self.values else ""

    @property
    def instantiation(self) -> str:
        """The line that MLX adds for templates."""
        if not self.values:
            return ""
        return (
            f'\ntemplate [[host_name("{self.name}")]] [[kernel]] decltype({self.call}) '
            f"{self.call};\n"
        )


def generate(
    name: str,
    header: str,
    source: str,
    inputs: Sequence[tuple[str, mx.array]],
    outputs: Sequence[tuple[str, mx.Dtype]],
    template: Sequence[tuple[str, TemplateValue]],
    atomic_outputs: bool = False,
) -> Generated:
    """The kernel that MLX would compile for these arguments."""
    values = f"<{', '.join(_value(value) for _, value in template)}>" if template else ""
    full_name = f"custom_kernel_{name}"
    if template:
        full_name += "_" + values.replace("<", "_").replace(", ", "_").removesuffix(">")
    for _, array in inputs:
        passed = "s" if array.ndim == 0 else "c" if array.size < FEWEST_DEVICE_ELEMENTS else ""
        full_name += f"_{TYPE_NAMES[array.dtype]}{passed}"
    for _, dtype in outputs:
        full_name += f"_{TYPE_NAMES[dtype]}"

    arguments = []
    for input_name, array in inputs:
        arguments += _of_input(input_name, array, source)
    for output_name, dtype in outputs:
        type_name = TYPE_NAMES[dtype]
        type_name = f"atomic<{type_name}>" if atomic_outputs else type_name
        arguments.append(Argument(output_name, "device", type_name, output=True))
    attributes = [attribute for attribute in ATTRIBUTES if attribute in source]

    parameters = [
        f"  {argument.declaration} [[buffer({i})]]" for i, argument in enumerate(arguments)
    ]
    parameters += [f"  {ATTRIBUTES[a]} {a} [[{a}]]" for a in attributes]
    text = header
    if template:
        text += f"template <{', '.join(f'{_kind(v)} {n}' for n, v in template)}>\n"
    text += f"[[kernel]] void {full_name}(\n" + ",\n".join(parameters) + ") {\n" + source + "\n}\n"
    return Generated(full_name, values, text, tuple(arguments), tuple(attributes))


def _of_input(name: str, array: mx.array, source: str) -> list[Argument]:
    space = "constant" if array.size < FEWEST_DEVICE_ELEMENTS else "device"
    arguments = [Argument(name, space, TYPE_NAMES[array.dtype], reference=array.ndim == 0)]
    if array.ndim > 0:
        # MLX looks for the bare text, so a name that ends another's name is found there too.
        for of, type_name in (("shape", "int"), ("strides", "int64_t"), ("ndim", "int")):
            if f"{name}_{of}" in source:
                arguments.append(
                    Argument(f"{name}_{of}", "constant", type_name, of == "ndim", of=(name, of))
                )
    return arguments


def _kind(value: TemplateValue) -> str:
    if isinstance(value, mx.Dtype):
        return "typename"
    return "bool" if isinstance(value, bool) else "int"


def _value(value: TemplateValue) -> str:
    return TYPE_NAMES[value] if isinstance(value, mx.Dtype) else str(int(value))
