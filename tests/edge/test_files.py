"""The edge's files: certificates that change, scripts, and the README's commands."""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import subprocess
import threading
import time
from pathlib import Path

import daemon as daemon_module
import models
import pytest
from deploy_files import DEPLOY, ROOT
from edge_server import BUILD_DIR, EDGE, Edge, accepts, configuration, wait_until

import weft

ROTATIONS = int(os.environ.get("WEFT_ROTATIONS", "2"))


class Caller(threading.Thread):
    """Makes calls one after another until it is told to end. `fresh` opens a connection
    for each call."""

    def __init__(self, edge: Edge, fresh: bool) -> None:
        super().__init__()
        self._edge, self._fresh = edge, fresh
        self.done = 0
        self.failures: list[str] = []
        self.stop = threading.Event()

    def run(self) -> None:
        while not self.stop.is_set():
            with self._edge.client(self._edge.bob) as client:
                while not self.stop.is_set():
                    try:
                        client.info()
                        self.done += 1
                    except weft.WeftError as error:
                        self.failures.append(str(error))
                    time.sleep(0.02)  # A reload of nginx takes longer.
                    if self._fresh:
                        break


def serial(edge: Edge) -> int:
    with edge.connect() as sock:
        certificate = sock.getpeercert()
        assert certificate is not None
        return int(str(certificate["serialNumber"]), 16)


def test_no_call_fails_while_certificates_rotate(edge: Edge) -> None:
    """The authority stays, and so does the client's ca.crt."""
    callers = [Caller(edge, fresh) for fresh in (False, False, True)]
    for caller in callers:
        caller.start()
    try:
        with edge.client(edge.bob) as long_lived:
            assert long_lived.info().model.name
            for _ in range(ROTATIONS):
                old = serial(edge)
                edge.make_certificate("--force", "localhost", "127.0.0.1")
                wait_until(lambda old=old: serial(edge) != old, edge.log, 10)
                time.sleep(0.5)
            assert long_lived.info().model.name
    finally:
        for caller in callers:
            caller.stop.set()
            caller.join()
    print([caller.done for caller in callers])
    assert [caller.failures for caller in callers] == [[], [], []]
    assert all(caller.done > 20 for caller in callers)


def test_a_bad_certificate_leaves_the_old_one(edge: Edge) -> None:
    file = edge.folder / "tls" / "tls.crt"
    good, old = file.read_bytes(), serial(edge)
    file.write_text("no certificate")
    wait_until(lambda: "the old ones stay" in edge.log(), edge.log, 10)
    assert serial(edge) == old
    file.write_bytes(good)
    wait_until(lambda: edge.log().count("reloaded") >= 1, edge.log, 10)


def edge_alone(folder: Path, *command: str, listen: str = "") -> subprocess.Popen[str]:
    """Starts run.sh with a command beside it."""
    port = daemon_module.free_port()
    subprocess.run(
        [str(EDGE / "certificate.sh"), "--dir", str(folder), "localhost"], check=True
    )
    (folder / "nginx.conf").write_text(configuration({}, port))
    (folder / "port").write_text(str(port))
    options = ["--listen", listen] if listen else []
    return subprocess.Popen(
        [EDGE / "run.sh", "--dir", folder, *options, "--", *command],
        start_new_session=True,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )


def test_the_edge_ends_with_its_command(tmp_path: Path) -> None:
    process = edge_alone(tmp_path, "sh", "-c", "sleep 0.5; exit 3")
    output, _ = process.communicate(timeout=20)
    assert process.returncode == 3, output


def test_interrupts_while_nginx_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The command ends, and Ctrl-C is pressed twice, before nginx takes signals."""
    slow, started = tmp_path / "bin" / "nginx", tmp_path / "started"
    slow.parent.mkdir()
    real = shutil.which("nginx", path=f"{os.environ['PATH']}:/usr/sbin")
    slow.write_text(
        f'#!/bin/sh\ncase "$*" in *" -t "*) ;; *) touch {started}; sleep 2 ;; esac\n'
        f'exec {real} "$@"\n'
    )
    slow.chmod(0o755)
    monkeypatch.setenv("PATH", f"{slow.parent}:{os.environ['PATH']}")
    process = edge_alone(tmp_path, "true")
    wait_until(started.exists, lambda: "nginx was not started", 20)
    for _ in range(2):
        time.sleep(0.5)
        os.killpg(process.pid, signal.SIGINT)
    output, _ = process.communicate(timeout=20)
    assert process.returncode == 0, output


def test_the_command_drains_before_nginx_ends(tmp_path: Path) -> None:
    """curl, inside the command's handler of SIGTERM, still gets an answer of nginx."""
    url = f"https://localhost:$(cat {tmp_path}/port)"
    drain = (
        f"trap 'echo draining; sleep 1; curl -sk {url}"
        '/none -w "status %{http_code}"; exit 0\' TERM; echo started;'
        " while true; do sleep 0.1; done"
    )
    process = edge_alone(tmp_path, "bash", "-c", drain)
    assert process.stdout is not None
    assert "started" in process.stdout.readline()
    time.sleep(0.5)
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=20)
    assert "draining" in output and "status 404" in output, output
    assert process.returncode == 0, output


@pytest.mark.parametrize("listen", ["{}", "127.0.0.1:{}", "localhost:{}"])
def test_the_edge_listens_where_it_is_told(listen: str, tmp_path: Path) -> None:
    port = daemon_module.free_port()
    process = edge_alone(tmp_path, "sleep", "60", listen=listen.format(port))
    wait_until(lambda: accepts(port), lambda: "the edge does not serve", 20)
    with pytest.raises(ConnectionRefusedError):
        accepts(int((tmp_path / "port").read_text()))
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=20)


def test_stdout_may_be_a_socket(tmp_path: Path) -> None:
    """As of a unit of systemd. No program can open it by its name."""
    edge_alone(tmp_path, "true").communicate(timeout=20)
    ours, theirs = socket.socketpair()
    with ours, theirs:
        words = [str(EDGE / "run.sh"), "--dir", str(tmp_path), "--", "true"]
        done = subprocess.run(
            words, stdout=theirs.fileno(), stderr=subprocess.PIPE, timeout=20
        )
    assert done.returncode == 0, done.stderr


def test_a_hangup_makes_nginx_use_its_files_anew(tmp_path: Path) -> None:
    process = edge_alone(tmp_path, "sleep", "60")
    port = int((tmp_path / "port").read_text())
    wait_until(lambda: accepts(port), lambda: "the edge does not serve", 20)
    process.send_signal(signal.SIGHUP)
    assert process.stdout is not None
    while "edge: reloaded" not in (line := process.stdout.readline()):
        assert line, "the edge has ended"
    assert accepts(port)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=20)
    # `sleep` ends with the status of SIGTERM.
    assert process.returncode == 128 + signal.SIGTERM


def test_the_edge_outlives_the_end_of_its_own_nginx_conf(tmp_path: Path) -> None:
    """Then it has the one beside run.sh."""
    port = daemon_module.free_port()
    process = edge_alone(tmp_path, "sleep", "60", listen=f"127.0.0.1:{port}")
    wait_until(lambda: accepts(port), lambda: "the edge does not serve", 20)
    (tmp_path / "nginx.conf").unlink()
    assert process.stdout is not None
    while '"edge: ' not in (line := process.stdout.readline()):
        assert line, "the edge has ended"
    assert accepts(port) and process.poll() is None
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=20)


def test_a_certificate_near_its_end_is_logged(tmp_path: Path) -> None:
    process = edge_alone(tmp_path, "sleep", "1")
    process.communicate(timeout=20)
    tls = tmp_path / "tls"
    subprocess.run(
        ["openssl", "req", "-x509", "-key", str(tls / "tls.key"), "-days", "20"]
        + ["-subj", "/CN=localhost", "-out", str(tls / "tls.crt")],
        check=True,
    )
    command = [str(EDGE / "run.sh"), "--dir", str(tmp_path), "--", "true"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=20)
    assert "the certificate expires in less than 21 days" in done.stderr


def certificate(folder: Path, name: str, *extensions: str) -> str:
    """Makes a certificate of its own key, NAME.key, and returns its text."""
    key, text = folder / f"{name}.key", folder / f"{name}.crt"
    options = [word for one in extensions for word in ("-addext", one)]
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-nodes", "-days", "90", *options]
        + ["-pkeyopt", "ec_paramgen_curve:P-256", "-subj", f"/CN={name}"]
        + ["-keyout", str(key), "-out", str(text)],
        check=True,
        capture_output=True,
    )
    return text.read_text()


def started(folder: Path, *command: str) -> subprocess.CompletedProcess[str]:
    """Starts the edge beside a command, and waits until both have ended."""
    words = [str(EDGE / "run.sh"), "--dir", str(folder), "--", *(command or ["true"])]
    return subprocess.run(words, capture_output=True, text=True, timeout=30)


def test_certificates_that_no_client_would_take_are_named(tmp_path: Path) -> None:
    edge_alone(tmp_path, "true").communicate(timeout=20)
    tls = tmp_path / "tls"
    own, issuer = certificate(tls, "tls"), certificate(tls, "issuer")
    (tls / "tls.crt").write_text(issuer + own)
    refused = started(tmp_path)
    assert refused.returncode == 1
    assert "must begin with the certificate of tls.key" in refused.stderr
    assert started(tmp_path).returncode == 1
    (tls / "tls.crt").write_text(own + issuer)
    served = started(tmp_path)
    assert (served.returncode, served.stderr.count("tls.crt")) == (0, 0), served.stderr
    authority = "authorityInfoAccess=caIssuers;URI:http://127.0.0.1/issuer"
    (tls / "tls.crt").write_text(certificate(tls, "tls", authority))
    alone = started(tmp_path)
    assert alone.returncode == 0
    assert "has no certificate of its issuer behind its own" in alone.stderr
    lock = ["openssl", "pkey", "-in", str(tls / "tls.key"), "-aes256"]
    lock += ["-passout", "pass:secret", "-out", str(tls / "locked.key")]
    subprocess.run(lock, check=True)
    (tls / "locked.key").replace(tls / "tls.key")
    locked = started(tmp_path)
    assert locked.returncode == 1
    assert "without a passphrase" in locked.stderr


def test_the_edge_serves_both_families_of_addresses(tmp_path: Path) -> None:
    """In a network of its own, because the shipped file listens on all addresses."""
    alone = ["unshare", "-n", "sh", "-c", 'ip link set lo up && exec "$@"', "sh"]
    if subprocess.run([*alone, "true"], capture_output=True).returncode != 0:
        pytest.skip("this process may make no network")
    certificate(tmp_path, "x")
    (tmp_path / "tls").mkdir()
    for end in ("crt", "key"):
        (tmp_path / f"x.{end}").rename(tmp_path / "tls" / f"tls.{end}")
    ask = (
        "for host in 127.0.0.1 [::1]; do"
        " curl -sk --retry 50 --retry-connrefused --retry-delay 1 -o /dev/null"
        " https://$host:8443/none; done"
    )
    words = [*alone, str(EDGE / "run.sh"), "--dir", str(tmp_path), "--", "sh", "-c"]
    done = subprocess.run([*words, ask], capture_output=True, text=True, timeout=60)
    for peer in ("127.0.0.1", "::1"):
        line = next(a for a in done.stdout.splitlines() if f'"peer":"{peer}"' in a)
        assert '"status":404' in line


def test_the_workers_end_if_nginx_is_killed(tmp_path: Path) -> None:
    process = edge_alone(tmp_path, "sleep", "60")
    port = int((tmp_path / "port").read_text())
    wait_until(lambda: accepts(port), lambda: "the edge does not serve", 20)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text()
    (nginx,) = (
        int(pid)
        for pid in children.split()
        if "nginx" in Path(f"/proc/{pid}/comm").read_text()
    )
    os.kill(nginx, signal.SIGKILL)
    output, _ = process.communicate(timeout=20)
    assert process.returncode != 0, output
    with pytest.raises(ConnectionRefusedError):
        accepts(port)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["run.sh", "--dir", "{}"], "deploy/edge/certificate.sh makes them"),
        (["run.sh", "--tls"], "unknown option --tls"),
        (["run.sh", "--listen", "a b:1"], "must be PORT or ADDRESS:PORT"),
        (["certificate.sh", "--dir", "{}"], "Usage"),
        (["certificate.sh", "--dir", "{}", "a b"], "neither a name nor an address"),
        (["certificate.sh", "--dir", "{}", "--client", "x"], "has no authority"),
    ],
)
def test_scripts_say_what_is_wrong(
    words: list[str], message: str, tmp_path: Path
) -> None:
    program, *rest = words
    command = [str(EDGE / program), *(word.format(tmp_path) for word in rest)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=20)
    assert done.returncode != 0 and message in done.stderr, done


def test_a_missing_nginx_is_named_with_its_cure(tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    for program in ("bash", "dirname", "env"):
        (tmp_path / "bin" / program).symlink_to(str(shutil.which(program)))
    script = (EDGE / "run.sh").read_text().replace(":/usr/sbin", "")
    (tmp_path / "run.sh").write_text(script)
    done = subprocess.run(
        ["bash", tmp_path / "run.sh"],
        env={"PATH": str(tmp_path / "bin")},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1
    assert done.stderr == "edge: nginx is missing: run deploy/setup.sh --edge\n"


def test_an_existing_certificate_is_kept(tmp_path: Path) -> None:
    command = [str(EDGE / "certificate.sh"), "--dir", str(tmp_path)]
    command += ["weft.example.org", "::1"]
    subprocess.run(command, check=True)
    made = (tmp_path / "tls" / "tls.crt").read_bytes()
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 1 and "--force replaces it" in done.stderr
    assert (tmp_path / "tls" / "tls.crt").read_bytes() == made
    text = subprocess.run(
        ["openssl", "x509", "-in", tmp_path / "tls" / "tls.crt", "-noout", "-text"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert "DNS:weft.example.org, IP Address:0:0:0:0:0:0:0:1" in text
    for secret in ("tls/tls.key", "authority.key"):
        assert (tmp_path / secret).stat().st_mode & 0o077 == 0


def test_three_commands_of_the_readme_serve_others(tmp_path: Path) -> None:
    text = (DEPLOY / "README.md").read_text()
    block = re.search(r"```\n(deploy/edge/certificate.sh.*?)```", text, re.S)
    assert block
    script = re.sub(r"\\\n", " ", block[1])
    commands = [line.partition("  #")[0].strip() for line in script.splitlines()]
    assert len(commands) == 3, commands
    model = re.search(r"--model (\S+)", commands[2])
    assert model
    # A copy of the checkout: the same paths, other ports.
    shutil.copytree(EDGE, tmp_path / "deploy" / "edge")
    (tmp_path / "build").mkdir()
    (tmp_path / "build" / "cpu").symlink_to(BUILD_DIR)
    (tmp_path / model[1]).parent.mkdir(parents=True)
    (tmp_path / model[1]).symlink_to(models.tiny_model("llama-tied"))
    ports = {port: f"127.0.0.1:{daemon_module.free_port()}" for port in (50051, 9400)}
    ports[8460] = f"127.0.0.1:{daemon_module.free_port()}"
    listen = daemon_module.free_port()
    conf = tmp_path / "deploy" / "edge" / "nginx.conf"
    conf.write_text(configuration(ports, listen))
    environment = {
        **os.environ,
        "WEFT_LISTEN": ports[50051],
        "WEFT_METRICS_LISTEN": ports[9400],
    }
    first = commands[0].replace("weft.example.org", "localhost")
    third = commands[2].replace("127.0.0.1:8460", ports[8460])
    subprocess.run(first, shell=True, cwd=tmp_path, check=True)
    token = subprocess.run(
        commands[1],
        shell=True,
        cwd=tmp_path,
        check=True,
        capture_output=True,
        text=True,
    ).stdout.strip()
    log = tmp_path / "log"
    with log.open("wb") as file:
        process = subprocess.Popen(
            third.split(), cwd=tmp_path, env=environment, stdout=file, stderr=file
        )
    try:
        wait_until(lambda: accepts(listen), log.read_text)
        security = weft.Security(
            token=token,
            root_certificates=(tmp_path / "run/edge/tls/ca.crt").read_bytes(),
        )
        with weft.Client(f"localhost:{listen}", security=security) as client:
            adapter = client.create_adapter("mine", rank=2)
            assert adapter.sample([5], max_tokens=2, ignore_eos=True).samples
    finally:
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0, log.read_text()


def test_the_main_readme_leads_to_the_edge() -> None:
    assert "deploy/edge/run.sh" in (ROOT / "README.md").read_text()
