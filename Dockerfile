# CPU image: docker build -t deepinfer . && docker run --rm deepinfer run "17+25?"
# A checkpoint is mounted: docker run --rm -v /path/to/model:/model:ro deepinfer run --model /model "17+25?"
FROM python:3.12-slim AS build
WORKDIR /src
COPY pyproject.toml constraints.txt hatch_build.py README.md LICENSE ./
COPY deepinfer_cli deepinfer_cli
COPY engine engine
COPY kernels kernels
COPY profiles profiles
COPY recipes recipes
RUN python -m venv /venv \
    && /venv/bin/pip install --no-cache-dir --disable-pip-version-check \
        --extra-index-url https://download.pytorch.org/whl/cpu -c constraints.txt .

FROM python:3.12-slim
COPY --from=build /venv /venv
RUN useradd --create-home deepinfer
USER deepinfer
WORKDIR /home/deepinfer
ENTRYPOINT ["/venv/bin/deepinfer"]
CMD ["--help"]
