# What `make install` does, in an image: docker build -t vla-rl . && docker run --rm vla-rl vla-rl doctor
FROM python:3.11-slim-bookworm

# Mesa's EGL renders without a GPU; make runs the two commands; git is for the dev container. The image itself has no
# .git, so bundles and results that it writes name no revision.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --no-install-recommends --yes git libegl1 libegl-mesa0 libgl1 libgl1-mesa-dri make \
    && rm -rf /var/lib/apt/lists/*

WORKDIR /work
# The dependencies change rarely, so they are a layer of their own.
COPY pyproject.toml constraints.txt README.md LICENSE ./
# hadolint ignore=DL3013
RUN python -m venv .venv \
    && .venv/bin/pip install --no-cache-dir --upgrade pip \
    && .venv/bin/python -c "import tomllib; print(*tomllib.load(open('pyproject.toml', 'rb'))['project']['dependencies'], sep='\n')" > /tmp/dependencies.txt \
    && .venv/bin/pip install --no-cache-dir --constraint constraints.txt --requirement /tmp/dependencies.txt

COPY . .
RUN make install

ENV PATH=/work/.venv/bin:$PATH OMP_NUM_THREADS=1 MUJOCO_GL=egl
RUN useradd --create-home user && chown user . && mkdir -p runs && chown user runs
USER user
CMD ["vla-rl", "doctor"]
