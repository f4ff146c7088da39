"""Debian's headless Chromium, installed if missing."""

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from selenium import webdriver
from selenium.webdriver.chrome.options import Options
from selenium.webdriver.chrome.service import Service

_PACKAGES = ("chromium", "chromium-driver", "fonts-liberation")
_LOAD_SECONDS = 60


def ensure_chromium() -> None:
    """Find Chromium, or install it with apt-get. Skips the test if neither works."""
    if shutil.which("chromium") and shutil.which("chromedriver"):
        return
    if os.geteuid() != 0 or shutil.which("apt-get") is None:
        pytest.skip(f"install Debian's {', '.join(_PACKAGES)} first, or be root on Debian")
    print(f"installing Debian's {', '.join(_PACKAGES)} (a minute)")
    env = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    for command in (
        ("apt-get", "update", "-q"),
        ("apt-get", "install", "-y", "-q", "--no-install-recommends", *_PACKAGES),
    ):
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=600, check=False, env=env
        )
        assert done.returncode == 0, done.stderr[-2000:]


@contextmanager
def browser(
    *, width: int = 1280, height: int = 900, dark: bool = False, script: bool = True
) -> Iterator[webdriver.Chrome]:
    """A page of this size and colour scheme, with JavaScript or without."""
    ensure_chromium()
    options = Options()
    options.binary_location = str(shutil.which("chromium"))
    for argument in (
        "--headless=new",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-dev-shm-usage",
        "--no-first-run",
        "--disable-background-networking",
        "--hide-scrollbars",
    ):
        options.add_argument(argument)
    if not script:
        setting = "profile.managed_default_content_settings.javascript"
        options.add_experimental_option("prefs", {setting: 2})
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=Service(shutil.which("chromedriver")))
    try:
        driver.set_page_load_timeout(_LOAD_SECONDS)
        # The window has a minimum width; this size has none.
        driver.execute_cdp_cmd(
            "Emulation.setDeviceMetricsOverride",
            {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 500},
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [scheme]})
        yield driver
    finally:
        driver.quit()
