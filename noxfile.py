"""The checks of the project.

`nox -l` lists them; `nox -s lint`, `nox -s "tests(torch)"`, `nox -s docs` run one each.
Every session has its own environment, which later runs reuse.
"""

import tomllib
from pathlib import Path

import nox

nox.needs_version = ">=2024.4.15"
nox.options.reuse_venv = "yes"
nox.options.sessions = ["lint", "types", "tests", "docs"]

BACKENDS = {
    "numpy": "test",
    "torch": "test,torch,trainer,triton",
    "jax": "test,jax",
    "mlx": "test,mlx",
    "array_api_strict": "test",
}
#: Libraries that lack a part of the standard; `docs/backends.md` has the outcomes.
PARTIAL = {"dask": ["dask[array]"], "ndonnx": ["ndonnx", "onnxruntime"]}
PARTS = ["-e", "conformance", "-e", "bench"]  # distributions of their own
EACH = [nox.param(name, id=name) for name in BACKENDS]
EACH_PARTIAL = [nox.param(name, id=name) for name in PARTIAL]
PYTHONS = ["3.11", "3.12", "3.13", "3.14"]


def install(session: nox.Session, backend: str) -> None:
    """Install the requirements of one backend's tests, in the versions of `constraints.txt`."""
    session.install("-c", "constraints.txt", "-e", f".[{BACKENDS[backend]}]", *PARTS)


@nox.session
def lint(session: nox.Session) -> None:
    """Check Ruff's rules, the format and the spelling."""
    session.install("ruff>=0.15", "codespell>=2.4")
    session.run("ruff", "check", ".")
    session.run("ruff", "format", "--check", ".")
    session.run("codespell")
    session.run("python", "scree_api/generate_ragged.py", "--check")


@nox.session
def generate(session: nox.Session) -> None:
    """Write the generated modules: the operations of `xp.ragged`, and the typed namespace.

    `generate -- --check` only compares.
    """
    session.install("ruff>=0.15", "-e", ".")
    session.run("python", "scree_api/generate_ragged.py", *session.posargs)
    session.run("ruff", "format", "scree_api/scree/ragged.py")
    session.run("python", "scree_api/generate_standard.py", *session.posargs)


@nox.session
def types(session: nox.Session) -> None:
    """Run strict mypy on `scree`, and mypy and pyright on the code of a user.

    In `scree` the array libraries are Any, so none has to be installed. The typed namespace must be
    current.
    """
    session.install("mypy>=1.18", "basedpyright>=1.31", "ruff>=0.15", "-e", ".")
    session.run("mypy")
    session.run("python", "scree_api/generate_standard.py", "--check")
    session.run("python", "scree_api/tests/typing/check.py")


@nox.session
@nox.parametrize("backend", EACH)
def tests(session: nox.Session, backend: str) -> None:
    """Run the tests on one backend, with no other array library installed."""
    install(session, backend)
    names = {"array_api_strict": "array_api_strict,strict_minimal"}.get(backend, backend)
    workers = ("-n", "2", "--dist", "worksteal")
    session.run("pytest", *workers, *session.posargs, env={"SCREE_BACKENDS": names})


@nox.session
@nox.parametrize("backend", EACH + EACH_PARTIAL)
def conformance(session: nox.Session, backend: str) -> None:
    """Run the conformance suite on one backend, as another project would run it.

    dask.array and ndonnx build a graph per call, so they run one case per operation.
    """
    options = session.posargs
    if backend in PARTIAL:
        needed = PARTIAL[backend]
        session.install("-c", "constraints.txt", "-e", ".", "-e", "conformance", *needed)
        options = options or ["--quick"]
    else:
        install(session, backend)
    session.run("python", "-m", "scree_conformance", "--backend", backend, *options)


@nox.session
@nox.parametrize("backend", EACH)
def floors(session: nox.Session, backend: str) -> None:
    """Run the conformance suite with the lowest versions that `pyproject.toml` accepts."""
    project = tomllib.loads(Path("pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    strict = [name for name in extras["test"] if name.startswith("array-api-strict")]
    accepted = project["dependencies"] + {"array_api_strict": strict, **extras}.get(backend, [])
    lowest = [requirement.replace(">=", "==") for requirement in accepted]
    session.install("-e", ".", "-e", "conformance", *lowest)
    session.run("scree", "conformance", "--backend", backend, *session.posargs)


@nox.session(python=PYTHONS)
@nox.parametrize("backend", EACH)
def newest(session: nox.Session, backend: str) -> None:
    """Run the conformance suite with the newest versions of the libraries on every Python."""
    extra = f"[{backend}]" if backend in ("torch", "jax", "mlx") else ""
    strict = ["array-api-strict"] if backend == "array_api_strict" else []
    session.install("--upgrade", "-e", f".{extra}", "-e", "conformance", *strict)
    session.run("scree", "conformance", "--backend", backend, *session.posargs)


@nox.session
def fuzz(session: nox.Session) -> None:
    """Compare random calls with the oracle on every library.

    `fuzz -- --minutes 30 --seed 7` sets the time and the first case.
    """
    session.install("-c", "constraints.txt", "-e", ".[test,torch,trainer,jax,mlx]", *PARTS)
    session.run("python", "-m", "scree_conformance", "fuzz", *session.posargs)


@nox.session
def opinfo(session: nox.Session) -> None:
    """Compare scree with PyTorch on every sample of PyTorch's own nested-tensor database."""
    install(session, "torch")
    session.run(
        "pytest",
        "-n",
        "2",
        "scree_api/tests/test_opinfo_nested.py",
        *session.posargs,
        env={"SCREE_BACKENDS": "torch", "SCREE_OPINFO": "all"},
    )


@nox.session(venv_params=["--system-site-packages"])
def upstream_tests(session: nox.Session) -> None:
    """Run test files of FlashAttention, PyTorch, Liger-Kernel, quack and transformers on scree.

    The arguments are checkouts of these projects: `upstream_tests -- flash_attn=DIR liger=DIR`.
    Without arguments the session lists the projects, with their commits and licences. On a CPU it
    runs a few cases of each test. An installed torch, which may have CUDA, is used.
    """
    session.install(
        *("-c", "constraints.txt", "-e", ".[test,triton]", "-e", "conformance"),
        *("einops>=0.8", "expecttest>=0.3", "transformers>=5", "pytest-xdist>=3", "parameterized"),
    )
    session.run("python", "conformance/upstream/run.py", *session.posargs)


@nox.session
@nox.parametrize("version", ["5.17", "5.20", "5.23", "5.24"])
def transformers(session: nox.Session, version: str) -> None:
    """Test the continuous batching of transformers on the versions that decide by a name."""
    install(session, "torch")
    session.install(f"transformers=={version}.*")
    session.run("pytest", "scree_api/tests/bridges/test_continuous_batching.py", *session.posargs)


@nox.session
def clients(session: nox.Session) -> None:
    """Run programs of other projects on scree, on the CPU, from checkouts in one folder.

    `clients -- FOLDER` runs the script of every checkout that the folder has; see docs/clients.md.
    """
    if len(session.posargs) != 1:
        session.error("expected the folder of the checkouts: nox -s clients -- FOLDER")
    install(session, "torch")
    # TRL and the encoders of sentence-transformers
    session.install("accelerate", "datasets", "filelock", "requests", "scikit-learn")
    session.install("spmd_types", "torchdata", "tyro")  # torchtitan
    tokens = str(Path(session.create_tmp()) / "tokens.json")
    for name, runs in {
        "nano-vllm": [
            ("nano_vllm.py", "--attention", "torch", "--write", tokens),
            ("nano_vllm.py", "--attention", "scree", "--compare", tokens),
        ],
        "nanochat": [("nanochat.py",)],
        "modded-nanogpt": [("modded_nanogpt.py",)],
        "torchtitan": [("torchtitan.py",)],
        "trl": [("trl_sft.py",)],
        "sentence-transformers": [("sentence_encoders.py",)],
    }.items():
        checkout = Path(session.posargs[0]) / name
        if not checkout.is_dir():
            session.warn(f"no checkout {checkout}")
            continue
        for script, *options in runs:
            session.run("python", f"conformance/clients/{script}", str(checkout), *options)


@nox.session
def curves(session: nox.Session) -> None:
    """Train the same model on PyTorch, JAX and MLX for 50 steps; the losses must agree to 1e-3."""
    session.install("-c", "constraints.txt", "-e", ".[torch,jax,mlx,train]")
    session.run("python", "scree_api/tests/compare_curves.py", *session.posargs)


@nox.session
def tensorflow(session: nox.Session) -> None:
    """Test the bridge to TensorFlow, in a separate environment because of its size."""
    session.install(
        *("-c", "constraints.txt", "-e", ".", "-e", "conformance"),
        *("tensorflow-cpu>=2.21", "pytest>=8", "hypothesis>=6.100"),
    )
    files = [
        "scree_api/scree/bridges/tensorflow.py",
        *map(str, Path("scree_api/tests/bridges").glob("test_tensorflow*.py")),
    ]
    session.run("pytest", *files, env={"TF_CPP_MIN_LOG_LEVEL": "3", "SCREE_BACKENDS": "numpy"})


@nox.session
def docs(session: nox.Session) -> None:
    """Build the documentation into `site`; warnings are errors.

    `nox -s docs -- serve` previews it.
    """
    session.install("-e", ".[docs]", *PARTS)
    session.run(
        "mkdocs", *(session.posargs or ("build", "--strict")), env={"NO_MKDOCS_2_WARNING": "1"}
    )


@nox.session
def browser(session: nox.Session) -> None:
    """Build the documentation and open every page in Chromium, Debian's package `chromium`.

    `browser -- --pictures FOLDER` also writes pictures of some pages.
    """
    session.install("-c", "constraints.txt", "-e", ".[docs,test,torch,jax,mlx]", *PARTS)
    session.install("playwright>=1.50")
    session.run("mkdocs", "build", "--strict", env={"NO_MKDOCS_2_WARNING": "1"})
    session.run("python", "docs/check_site.py", *session.posargs)


@nox.session
def publish(session: nox.Session) -> None:
    """Write the documentation of this version into the branch `gh-pages`, beside other versions.

    The environment variable `SITE_URL` is the address of the site.
    """
    session.install("-e", ".[docs]", *PARTS, "mike>=2.1")
    version = session.run("scree", "--version", silent=True).split()[-1]
    env = {"NO_MKDOCS_2_WARNING": "1", "DOCS_VERSIONS": "mike"}
    session.run("mike", "deploy", "--update-aliases", version, "latest", env=env)
    session.run("mike", "set-default", "latest", env=env)


@nox.session
def demo(session: nox.Session) -> None:
    """Run the demo from an ordinary install, as users do."""
    session.install(".[demo]")
    session.run("python", "-m", "scree", "demo", *session.posargs)


@nox.session(venv_params=["--system-site-packages"])
def gpu(session: nox.Session) -> None:
    """Run the tests that need a CUDA device, with the installed torch and Triton if there are."""
    session.install("-e", ".[test,triton,jax]", *PARTS)
    session.run("pytest", "-m", "gpu", *session.posargs)


@nox.session(venv_params=["--system-site-packages"])
def stress(session: nox.Session) -> None:
    """Run random calls on a CUDA device for a long time, for instance -- --seconds 200 --seed 1."""
    session.install("-e", ".[test,triton]", *PARTS)
    session.run("python", "kernels_triton/tests/stress.py", *session.posargs)


@nox.session(venv_params=["--system-site-packages"])
def sanitize(session: nox.Session) -> None:
    """Run compute-sanitizer on the attention kernels.

    It finds accesses out of bounds and races in shared memory.
    """
    session.install("-e", ".[test,triton]", *PARTS, "nvidia-cuda-sanitizer-api>=13.5")
    paths = session.run(
        "python", "-c", "import nvidia; print(*nvidia.__path__)", silent=True
    ).split()
    program = next(
        p for path in paths for p in Path(path).glob("*/compute-sanitizer/compute-sanitizer")
    )
    for tool in ("memcheck", "racecheck"):
        session.run(
            str(program),
            "--tool",
            tool,
            "--error-exitcode",
            "1",
            "python",
            "kernels_triton/tests/sanitize.py",
            *session.posargs,
            external=True,
        )
