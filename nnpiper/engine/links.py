"""An emulated network: one namespace a stage, joined by a bridge, a bandwidth of its own for every directed pair.

All of it lives in one user, network and process namespace whose first process is `hub`: when that ends, in whatever
way, the kernel ends the stages and removes links and bridge with them. There is no other interface inside, so nothing
leaves the machine. Here are the texts for `ip` and `tc`, the command that enters, and the trial of what works.

Bandwidth is that of the payload: htb counts headers too, so a class gets bandwidth x FRAME / PAYLOAD.
"""

import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass

NETWORK = "10.77.0"
MTU = 1500  # bytes of an IP packet
PAYLOAD, FRAME = MTU - 52, MTU + 14  # bytes: IP, TCP and time stamp take 52 of a packet, Ethernet adds 14
SEGMENT = 4 * MTU  # bytes the kernel may hand to a link at once: more would be let through before it is counted
UNLIMITED = "40gbit"
TOOLS = ("ip", "tc", "unshare", "setpriv", "chrt")
TRIAL_TIMEOUT_S = 30.0

# Written below /proc/sys/net/ipv4 in every stage's namespace. The kernel takes about 16 KB ahead of a link and no more,
# so that a send which is done has nearly arrived; half as much let some fast links fall behind their bandwidth. Nothing
# is lost, so Reno opens its window once.
SETTINGS = {"tcp_congestion_control": "reno", "tcp_slow_start_after_idle": "0", "tcp_wmem": "4096 131072 131072",
            "tcp_limit_output_bytes": "8192", "tcp_notsent_lowat": "4096", "tcp_tso_rtt_log": "0"}


def address(rank: int) -> str:
    return f"{NETWORK}.{rank + 1}"


@dataclass(frozen=True)
class Access:
    """How namespaces can be made here: with a user namespace or as root; stages at real-time priority, or not; lacking,
    one line that says what is missing, or "" if nothing is."""

    as_root: bool = False
    real_time: bool = False
    lacking: str = ""


def environment() -> dict[str, str]:
    """This process's, with the folders of ip and tc on the path: they are not on a user's."""
    return {**os.environ, "PATH": f"{os.environ.get('PATH', os.defpath)}:/usr/sbin:/sbin"}


def enter_command(command: list[str], access: Access) -> list[str]:
    """`command` as the first process of new namespaces. It is killed when the process that started it ends, and all its
    children with it."""
    # other processes of the machine then delay a stage that wakes up less
    priority = ["chrt", "--fifo", "10"] if access.real_time else []
    user = [] if access.as_root else ["--user", "--map-root-user"]
    return [*priority, "setpriv", "--pdeathsig", "KILL", "--", "unshare", *user, "--net", "--pid", "--fork",
            "--kill-child", *command]


def hub_command(ranks: int) -> list[str]:
    return [sys.executable, "-m", "nnpiper.engine.hub", str(ranks)]


def access() -> Access:
    """What works here, by trial of one stage's whole network (bridge, cable into a namespace, classes, filters,
    settings): a user namespace first, then root; real-time priority first, then without."""
    absent = [tool for tool in TOOLS if shutil.which(tool, path=environment()["PATH"]) is None]
    if absent:
        return Access(lacking=f"{', '.join(absent)}: not installed (Debian: iproute2, util-linux)")
    refused = []
    for as_root in (False, True):
        for real_time in (True, False):
            found = Access(as_root, real_time)
            why = _trial(found)
            if not why:
                return found
        refused.append(f"{'as root' if as_root else 'in a user namespace'}: {why}")
    return Access(lacking=f"network namespaces with bridge and htb classes cannot be made ({'; '.join(refused)})")


def _trial(found):
    """What a hub says that does not come up, in one line; "" where it does. Without input it then ends."""
    try:
        ran = subprocess.run(enter_command(hub_command(1), found), stdin=subprocess.DEVNULL, capture_output=True,
                             text=True, env=environment(), timeout=TRIAL_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        return f"no answer in {TRIAL_TIMEOUT_S:g} s"
    if ran.returncode == 0:
        return ""
    if ran.stdout:
        return json.loads(ran.stdout.splitlines()[-1])["failed"]
    return (ran.stderr.strip().splitlines() or [f"exit code {ran.returncode}"])[-1]


def configure(tool: str, text: str) -> None:
    """Run `ip` or `tc` on lines of its own. Raises OSError with what it says, in one line."""
    ran = subprocess.run([tool, "-batch", "-"], input=text, capture_output=True, text=True)
    if ran.returncode != 0:
        raise OSError(f"{tool}: {'; '.join(ran.stderr.splitlines())}")


def bridge_text() -> str:
    """For `ip -batch`: the bridge, in the hub's namespace."""
    return "link set lo up\nlink add br0 type bridge\nlink set br0 up\n"


def cable_text(rank: int, pid: int) -> str:
    """For `ip -batch`, in the hub's namespace: a cable from the bridge into the namespace of a process."""
    return (f"link add v{rank} type veth peer name eth0 netns {pid}\n"
            f"link set v{rank} master br0 up\n")


def interface_text(rank: int) -> str:
    """For `ip -batch`, in a stage's namespace."""
    return ("link set lo up\n"
            f"link set eth0 mtu {MTU} gso_max_size {SEGMENT} up\n"
            f"addr add {address(rank)}/24 dev eth0\n")


def classes_text(rank: int, ranks: int) -> str:
    """For `tc -batch`, in a stage's namespace: a class for every other stage. Bare acknowledgements (under 64 bytes of
    IP) pass beside the classes: those of a fast direction would fill a slow reverse one."""
    lines = ["qdisc add dev eth0 root handle 1: htb default 1", class_line("add", 1, UNLIMITED, 1 << 20),
             "filter add dev eth0 parent 1: protocol ip prio 1 u32 match u16 0 0xffc0 at 2 flowid 1:1"]
    for peer in range(ranks):
        if peer != rank:
            lines.append(class_line("add", class_number(peer), UNLIMITED, 1 << 20))
            lines.append(f"filter add dev eth0 parent 1: protocol ip prio 2 u32 match ip dst {address(peer)}/32 "
                         f"flowid 1:{class_number(peer):x}")
    return "\n".join(lines) + "\n"


def rates_text(bytes_per_s: dict[int, float]) -> str:
    """For `tc -batch`, in a stage's namespace: {peer: payload bytes per second}."""
    lines = [class_line("change", class_number(peer), f"{round(8 * wire_rate(rate))}bit", burst_bytes(rate))
             for peer, rate in bytes_per_s.items()]
    return "".join(line + "\n" for line in lines)


def class_number(peer: int) -> int:
    return 0x10 + peer


def class_line(verb: str, number: int, rate: str, burst: int) -> str:
    return (f"class {verb} dev eth0 parent 1: classid 1:{number:x} htb rate {rate} burst {burst} cburst {burst} "
            f"quantum {MTU}")


def wire_rate(payload_bytes_per_s: float) -> float:
    return payload_bytes_per_s * FRAME / PAYLOAD


def burst_bytes(payload_bytes_per_s: float) -> int:
    """What a class may send at once after a pause: a packet, or what passes in 0.2 ms, for wake-ups that come late."""
    return max(FRAME, round(2e-4 * wire_rate(payload_bytes_per_s)))
