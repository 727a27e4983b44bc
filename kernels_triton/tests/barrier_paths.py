"""Find waits for an mbarrier that another warp or lane can overtake, in the PTX of Hopper kernels.

All warps of a partition of a warp-specialized CTA wait for an mbarrier, and one thread arrives for
all of them. If that thread arrives while another warp still polls, the slot of the ring may be used
again before the slow warp looks, and the slow warp waits forever. So every path from a wait to an
instruction that can complete a phase must pass a barrier:

- In a partition of consumers, 4 warps, before each arrival: ``bar.sync`` of the partition.
- In a producer, 1 warp, before each arrival and each TMA load: ``bar.warp.sync`` or ``elect.sync``,
  which all lanes must reach. ``mbarrier.arrive.expect_tx`` needs none: its phase completes when the
  bytes of the TMA loads after it have arrived. ``cp.async.mbarrier.arrive`` counts one arrival more
  and takes it back, so it does not complete a phase either.
"""

import re
from collections.abc import Iterator
from typing import NamedTuple

#: Registers per thread of a producer, which `setmaxnreg` sets at the start of the partition.
PRODUCER_REGISTERS = 24, 40

_LABEL = re.compile(r"^(\$?\w+):\s*(.*)$")
_BRANCH = re.compile(r"^(@!?%?\w+\s+)?bra(?:\.uni)?\s+(\$?\w+);")
_TABLE = re.compile(r"(\$?\w+):\s*\.branchtargets\s+([^;]*);")
_GROUP_BARRIER = re.compile(r"\b(bar|barrier)\.sync\b")
_WARP_BARRIER = re.compile(r"\b(bar\.warp|elect)\.sync\b")
_ARRIVAL = re.compile(r"(?<!async\.)mbarrier\.arrive\.shared")
_TMA_LOAD = re.compile(r"cp\.async\.bulk\.tensor\S*\.shared\S*\.global")


class State(NamedTuple):
    """What may have happened on a path: the registers of the partition, and waits since barriers."""

    registers: int | None = None
    waited_in_group: bool = False
    waited_in_warp: bool = False


class Block(NamedTuple):
    """A basic block: its instructions, and the names of the blocks that may follow."""

    instructions: list[str]
    successors: list[str]


def parse_blocks(ptx: str) -> dict[str, Block]:
    """Return the basic blocks of a kernel by name; the first is ``entry``."""
    tables = {name: re.findall(r"\$?\w+", targets) for name, targets in _TABLE.findall(ptx)}
    blocks: dict[str, Block] = {}
    scoped: dict[str, str] = {}  # labels of inline assembly repeat; a branch means the last one

    def begin(name: str) -> Block:
        return blocks.setdefault(name, Block([], []))

    block = begin("entry")
    for number, line in enumerate(map(str.strip, ptx.splitlines())):
        if label := _LABEL.match(line):
            name = label[1]
            if not name.startswith("$"):
                name = scoped[name] = f"{name} {number}"
            block.successors.append(name)
            block = begin(name)
        elif branch := _BRANCH.match(line):
            target = scoped.get(branch[2], branch[2])
            begin(target)
            block.successors.append(target)
            following = begin(f"line {number}")
            if branch[1]:
                block.successors.append(f"line {number}")
            block = following
        elif re.match(r"(ret|exit|trap);", line):
            block = begin(f"line {number}")
        elif line.startswith("brx.idx"):
            block.successors.extend(tables[line.split(",")[-1].strip(" ;")])
            block = begin(f"line {number}")
        else:
            block.instructions.append(line)
    return blocks


def _after(instruction: str, state: State) -> State:
    """Return the state after an instruction."""
    if "setmaxnreg" in instruction:
        return state._replace(registers=int(instruction.rstrip(";").split()[-1]))
    if "mbarrier.try_wait" in instruction:
        return State(state.registers, True, True)
    if _GROUP_BARRIER.search(instruction):
        return State(state.registers)
    if _WARP_BARRIER.search(instruction):
        return state._replace(waited_in_warp=False)
    return state


def _is_unsafe(instruction: str, state: State) -> bool:
    """Return whether an instruction may complete a phase while other threads still wait."""
    if state.registers in PRODUCER_REGISTERS:
        completes = _ARRIVAL.search(instruction) or _TMA_LOAD.search(instruction)
        return bool(completes) and state.waited_in_warp
    return bool(_ARRIVAL.search(instruction)) and state.waited_in_group


def unsafe_instructions(ptx: str) -> Iterator[str]:
    """Yield the instructions of a kernel that may complete a phase while others still wait."""
    blocks = parse_blocks(ptx)
    states: dict[str, set[State]] = {name: set() for name in blocks}
    states["entry"].add(State())
    pending = ["entry"]
    found = {}
    while pending:
        name = pending.pop()
        current = set(states[name])
        for i, instruction in enumerate(blocks[name].instructions):
            if any(_is_unsafe(instruction, state) for state in current):
                found[name, i] = instruction
            current = {_after(instruction, state) for state in current}
        for successor in blocks[name].successors:
            if not current <= states[successor]:
                states[successor] |= current
                pending.append(successor)
    yield from found.values()


def count_arrivals(ptx: str) -> int:
    """Return the number of arrivals in a kernel."""
    return len(_ARRIVAL.findall(ptx))
