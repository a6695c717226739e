"""Settings: what is asked is checked before anything is allocated; each message has a remedy."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trlow.errors import SettingsError
from trlow.settings import Settings, parse_gpus


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch):
    for field in dataclasses.fields(Settings):
        monkeypatch.delenv(f"TRLOW_{field.name.upper()}", raising=False)


@pytest.mark.parametrize(
    ("text", "devices"),
    [
        ("0", (0,)),
        ("0-3", (0, 1, 2, 3)),
        ("0,2,3", (0, 2, 3)),
        ("3,1", (3, 1)),
        ("2-2", (2,)),
        ("0-1, 4", (0, 1, 4)),
        ("all", (0, 1, 2, 3, 4)),
    ],
)
def test_device_lists(text, devices):
    assert parse_gpus(text, count=5) == devices


def test_all_stays_open_until_the_machine_is_known():
    assert parse_gpus("all") is None
    assert parse_gpus("0-7") == tuple(range(8))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("0-", "'0-' is neither"),
        ("-1", "'-1' is neither"),
        ("3-1", 'write "1-3"'),
        ("0,0", "device 0 twice"),
        ("0-2,1", "device 1 twice"),
        ("a", "'a' is neither"),
        ("", "'' is neither"),
        ("0,,1", "'' is neither"),
        ("0-1-2", "is neither"),
        ("1.5", "is neither"),
        ("²", "is neither"),
        ("0x1", "is neither"),
        ("ALL", "is neither"),
        ("0-4", "device 4 is beyond this machine, which has 4 (0 to 3)"),
        ("9", "device 9 is beyond"),
        ("0-99999999", "beyond this machine"),
    ],
)
def test_bad_device_lists_name_the_item_and_the_remedy(text, words):
    with pytest.raises(SettingsError) as caught:
        parse_gpus(text, count=4)
    assert words in str(caught.value)
    assert repr(text) in str(caught.value)


@pytest.mark.parametrize("text", ["0-99999999", "0-9999999999999999"])
def test_a_slip_in_an_interval_fills_no_memory(text):
    with pytest.raises(SettingsError):
        parse_gpus(text)


def test_what_is_no_text_is_refused():
    with pytest.raises(SettingsError, match="must be a string"):
        Settings(gpus=3)  # type: ignore[arg-type]


@given(st.sets(st.integers(0, 63), min_size=1))
def test_a_list_of_numbers_reads_back(devices):
    text = ",".join(map(str, devices))
    assert parse_gpus(text, count=64) == tuple(devices)


@pytest.mark.parametrize("count", [1, 2, 4, 8, 64])
def test_powers_of_two_are_accepted(count):
    assert Settings().devices(count) == tuple(range(count))


@pytest.mark.parametrize("gpus", ["0,2,3", "0-2", "0-5"])
def test_other_world_sizes_have_to_be_asked_for(gpus):
    with pytest.raises(SettingsError, match=r"power of two.*any_world_size"):
        Settings(gpus=gpus).devices(8)
    assert Settings(gpus=gpus, any_world_size=True).devices(8) == parse_gpus(gpus)


def test_all_of_an_odd_machine_is_refused_too():
    with pytest.raises(SettingsError, match="3 ranks"):
        Settings().devices(3)


def test_devices_beyond_the_machine_are_refused():
    with pytest.raises(SettingsError, match="device 3 is beyond this machine, which has 2"):
        Settings(gpus="0-3").devices(2)
    with pytest.raises(SettingsError, match="at least 1"):
        Settings().devices(0)


def test_local_batch_is_the_global_one_shared():
    assert Settings(global_batch_size=128).local_batch_size(4) == 32
    assert Settings(global_batch_size=3).local_batch_size(1) == 3


def test_an_indivisible_batch_names_both_numbers_and_the_nearest_that_fit():
    with pytest.raises(SettingsError, match="130 is not divisible by world size 4; use 128 or 132"):
        Settings(global_batch_size=130).local_batch_size(4)
    with pytest.raises(SettingsError, match="2 is not divisible by world size 4; use 4 or 4"):
        Settings(global_batch_size=2).local_batch_size(4)


def test_without_a_batch_size_there_is_no_local_one():
    with pytest.raises(SettingsError, match="set global_batch_size"):
        Settings().local_batch_size(2)
    with pytest.raises(SettingsError, match="world size 0"):
        Settings(global_batch_size=2).local_batch_size(0)


@pytest.mark.parametrize(
    "field",
    [
        {"device": "gpu"},
        {"device": ""},
        {"gpus": "0-"},
        {"global_batch_size": 0},
        {"global_batch_size": -4},
        {"global_batch_size": 1.5},
        {"global_batch_size": True},
        {"seed": -1},
        {"seed": 2**64},
        {"seed": 0.5},
        {"deadline_s": float("nan")},
        {"deadline_s": float("inf")},
        {"deadline_s": -1.0},
        {"deadline_s": 0},
        {"deadline_s": "60"},
        {"deadline_s": True},
        {"host_devices": 0},
        {"host_workers": -1},
        {"host_schedule_seed": -1},
        {"kernel_cache": "relative/folder"},
        {"kernel_cache": ""},
        {"kernel_cache": 3},
    ],
    ids=str,
)
def test_bad_values_are_refused_and_named(field):
    with pytest.raises(SettingsError) as caught:
        Settings(**field)
    assert repr(next(iter(field.values()))) in str(caught.value)


@pytest.mark.parametrize("field", [{"seed": 0}, {"seed": 2**64 - 1}, {"deadline_s": 1}], ids=str)
def test_limits_themselves_are_accepted(field):
    Settings(**field)


def test_the_environment_is_read_by_type(monkeypatch):
    monkeypatch.setenv("TRLOW_DEVICE", "host")
    monkeypatch.setenv("TRLOW_SEED", "7")
    monkeypatch.setenv("TRLOW_DEADLINE_S", "2.5")
    monkeypatch.setenv("TRLOW_ANY_WORLD_SIZE", "true")
    monkeypatch.setenv("TRLOW_GLOBAL_BATCH_SIZE", "96")
    monkeypatch.setenv("TRLOW_NCCL_LIBRARY", "/opt/libnccl.so")
    assert Settings.from_environment() == Settings(
        device="host",
        seed=7,
        deadline_s=2.5,
        any_world_size=True,
        global_batch_size=96,
        nccl_library="/opt/libnccl.so",
    )


def test_a_keyword_wins_over_the_environment_and_an_empty_variable_is_unset(monkeypatch):
    monkeypatch.setenv("TRLOW_SEED", "7")
    monkeypatch.setenv("TRLOW_DEADLINE_S", "")
    assert Settings.from_environment(seed=1) == Settings(seed=1)


def test_without_variables_the_environment_changes_nothing():
    assert Settings.from_environment() == Settings()


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("SEED", "x"),
        ("DEADLINE_S", "soon"),
        ("ANY_WORLD_SIZE", "2"),
        ("GPUS", "0-"),
        ("SEED", "-1"),
    ],
)
def test_bad_variables_are_refused(monkeypatch, name, text):
    monkeypatch.setenv(f"TRLOW_{name}", text)
    with pytest.raises(SettingsError, match=text):
        Settings.from_environment()


@pytest.mark.parametrize(
    ("variables", "folder"),
    [
        ({"XDG_CACHE_HOME": "/x", "HOME": "/h"}, "/x/trlow/kernels"),
        ({"XDG_CACHE_HOME": "", "HOME": "/h"}, "/h/.cache/trlow/kernels"),
        ({"XDG_CACHE_HOME": "relative", "HOME": "/h"}, "/h/.cache/trlow/kernels"),
        ({"HOME": "/h"}, "/h/.cache/trlow/kernels"),
        ({"HOME": "relative"}, None),
        ({}, None),
        ({"HOME": "/h", "TRLOW_KERNEL_CACHE": "/mine"}, "/mine"),
        ({"HOME": "/h", "TRLOW_KERNEL_CACHE": ""}, "/h/.cache/trlow/kernels"),
        ({"HOME": "/h", "TRLOW_KERNEL_CACHE": "off"}, None),
    ],
    ids=str,
)
def test_where_compiled_kernels_are_kept(monkeypatch, variables, folder):
    for name in ("XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert Settings.from_environment().kernel_cache_folder == folder


def test_settings_cannot_be_changed():
    with pytest.raises(dataclasses.FrozenInstanceError):
        Settings().seed = 3  # type: ignore[misc]
