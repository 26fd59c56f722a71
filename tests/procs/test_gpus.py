from pathlib import Path

from asyncgrpo_agent.procs.gpus import gpus_of_host


def test_device_files_are_counted(tmp_path: Path) -> None:
    for name in ("nvidia2", "nvidia5", "nvidiactl", "nvidia-uvm", "null"):
        (tmp_path / name).touch()
    assert gpus_of_host({}, tmp_path) == ["0", "1"]
    assert gpus_of_host({}, tmp_path / "none") == []


def test_what_the_user_shows_goes_first(tmp_path: Path) -> None:
    (tmp_path / "nvidia0").touch()
    assert gpus_of_host({"CUDA_VISIBLE_DEVICES": "3, GPU-8a,-1,4"}, tmp_path) == ["3", "GPU-8a"]
    assert gpus_of_host({"CUDA_VISIBLE_DEVICES": ""}, tmp_path) == []
