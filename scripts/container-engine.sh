#!/usr/bin/env bash
# A container engine with compose v2 and buildx, and the base images of Dockerfile and compose.yaml.
#
#   container-engine.sh up [prometheus]   makes sure of all of it; what is there already is taken. With
#                                         `prometheus`, of that image of observability.yaml, too
#   container-engine.sh down              ends the dockerd that `up` started, and no other; images stay
#
# Where Docker is installed and a registry answers, `up` does next to nothing. Else, on Debian 12 as root,
# it installs and starts Docker from Debian's packages, and where no registry can be reached, makes
# stand-ins for the base images from Debian's packages under the same names: python:3.11-slim-bookworm,
# redis:7-bookworm, prom/prometheus. From nothing that takes 2 to 6 minutes.
#
# Exit codes: 0 done, 69 no engine can be had here (the reason is the last line), 1 anything else.
set -euo pipefail

STATE=${CONTAINER_ENGINE_STATE:-/var/tmp/decoupled-diloco-engine-$UID}
PULL_TIMEOUT_S=90
PYTHON_IMAGE=python:3.11-slim-bookworm
REDIS_IMAGE=redis:7-bookworm
PROMETHEUS_IMAGE=prom/prometheus:v3.5.0
BASE_IMAGE=decoupled-diloco/standin-base:bookworm
export DEBIAN_FRONTEND=noninteractive RUNLEVEL=1 # packages start no services

say() { echo "container-engine: $*"; }

# Ends with 69: whoever calls may go on without containers.
unavailable() {
    [[ $# -lt 2 || ! -f $2 ]] || tail -n 20 "$2" >&2
    say "no container engine: $1" >&2
    exit 69
}

answers() { timeout 30 docker info >/dev/null 2>&1; }
has_plugins() { docker compose version >/dev/null 2>&1 && docker buildx version >/dev/null 2>&1; }
has_image() { docker image inspect "$1" >/dev/null 2>&1; }

may_install() {
    grep -qs '^VERSION_CODENAME=bookworm' /etc/os-release ||
        unavailable "$1, and this is no Debian 12 where it could be installed"
    [[ $(id -u) == 0 ]] || unavailable "$1, and installing it takes root"
}

# The mirror that this machine uses.
mirror() {
    # shellcheck disable=SC2016 # apt's own variable
    apt-get indextargets --format '$(SITE)' 'Release: bookworm' 'Created-By: Packages' | sed -n 1p
}

# Waits where somebody else is installing.
apt_install() {
    apt-get -o DPkg::Lock::Timeout=300 install -y -q --no-install-recommends "$@"
}

install_engine() {
    may_install "docker or dockerd is missing"
    say "installing docker.io"
    apt-get update -q >"$STATE/apt.log" 2>&1 || unavailable "apt-get update failed" "$STATE/apt.log"
    apt_install docker.io iproute2 iptables ca-certificates procps \
        >>"$STATE/apt.log" 2>&1 || unavailable "docker.io cannot be installed" "$STATE/apt.log"
}

# Bookworm has neither compose v2 nor buildx; the packages of the next release need only its libc.
install_plugins() {
    may_install "docker compose (v2) or docker buildx is missing"
    say "installing docker-compose and docker-buildx"
    local site lists=$STATE/next
    site=$(mirror)
    rm -rf "$lists" && mkdir -p "$lists/lists/partial" "$lists/cache/archives/partial"
    printf 'Types: deb\nURIs: %s\nSuites: trixie\nComponents: main\nSigned-By: %s\n' "$site" \
        /usr/share/keyrings/debian-archive-keyring.gpg >"$lists/next.sources"
    local options=(-o "Dir::Etc::sourcelist=$lists/next.sources" -o Dir::Etc::sourceparts=-
        -o "Dir::State::lists=$lists/lists" -o "Dir::Cache=$lists/cache" -o APT::Sandbox::User=root)
    (
        cd "$lists" &&
            apt_install debian-archive-keyring &&
            apt-get "${options[@]}" update -q &&
            apt-get "${options[@]}" download docker-compose docker-buildx &&
            apt_install ./docker-compose_*.deb ./docker-buildx_*.deb
    ) >"$STATE/plugins.log" 2>&1 || unavailable "they cannot be installed" "$STATE/plugins.log"
}

start_engine() {
    [[ $(id -u) == 0 ]] || unavailable "no dockerd answers this user, and starting one takes root"
    say "starting dockerd"
    rm -f "$STATE/dockerd.pid"
    setsid dockerd --pidfile "$STATE/dockerd.pid" >"$STATE/dockerd.log" 2>&1 </dev/null &
    local pid=$!
    for _ in $(seq 240); do
        if answers; then
            # setsid may have forked: the pid of dockerd is in its own file.
            cp "$STATE/dockerd.pid" "$STATE/dockerd.pid.ours"
            return
        fi
        kill -0 "$pid" 2>/dev/null || [[ -f $STATE/dockerd.pid ]] || break
        sleep 0.5
    done
    unavailable "dockerd does not start" "$STATE/dockerd.log"
}

# From the registry where one answers.
pull() { timeout "$PULL_TIMEOUT_S" docker pull -q "$1" >>"$STATE/pull.log" 2>&1; }

make_base() {
    may_install "no registry answers and debootstrap is needed for stand-in images"
    say "no registry answers: making stand-ins from Debian's packages"
    command -v debootstrap >/dev/null || apt_install debootstrap >>"$STATE/apt.log" 2>&1 ||
        unavailable "debootstrap cannot be installed" "$STATE/apt.log"
    local folder=$STATE site
    site=$(mirror)
    # In memory where there is room: debootstrap forces thousands of small files out.
    if [[ $(df -m --output=avail /dev/shm | tail -n 1) -gt 1000 ]] &&
        ! grep -qE ' /dev/shm [^ ]+ [^ ]*(noexec|nodev)' /proc/mounts; then
        folder=/dev/shm
    fi
    folder=$(mktemp -d "$folder/standin.XXXXXX")
    # shellcheck disable=SC2064 # the folder of now
    trap "rm -rf '$folder'" EXIT
    debootstrap --variant=minbase --include=ca-certificates bookworm "$folder/root" "$site" \
        >"$STATE/debootstrap.log" 2>&1 || { tail -n 20 "$STATE/debootstrap.log" >&2; exit 1; }
    rm -rf "$folder"/root/var/cache/apt/archives/*.deb "$folder"/root/var/lib/apt/lists/*
    tar -C "$folder/root" -c . | docker import -c 'CMD ["bash"]' \
        -c 'ENV PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin' - "$BASE_IMAGE" >/dev/null
    rm -rf "$folder"
}

# Builds a stand-in: its name, its Dockerfile on standard input, its context the folder of stand-ins.
build_standin() {
    cat >"$STATE/standin/Dockerfile"
    docker build -q -t "$1" "$STATE/standin" >"$STATE/build.log" 2>&1 ||
        { tail -n 20 "$STATE/build.log" >&2; say "the stand-in for $1 cannot be built" >&2; exit 1; }
}

# The Dockerfile of the stand-in for an image.
standin() {
    case "$1" in
    "$PYTHON_IMAGE") cat <<EOF ;;
FROM $BASE_IMAGE
COPY ca/ /usr/local/share/ca-certificates/
RUN update-ca-certificates && apt-get update \\
 && apt-get install -y --no-install-recommends python3.11 python3.11-venv libgomp1 netbase tzdata \\
 && rm -rf /var/lib/apt/lists/* && python3.11 -m venv /usr/local \\
 && printf '[global]\ncert = /etc/ssl/certs/ca-certificates.crt\n' > /etc/pip.conf
ENV LANG=C.UTF-8
CMD ["python3"]
EOF
    "$REDIS_IMAGE") cat <<EOF ;;
FROM $BASE_IMAGE
RUN apt-get update && apt-get install -y --no-install-recommends redis-server \\
 && rm -rf /var/lib/apt/lists/* && mkdir -p /data && chown redis:redis /data
VOLUME /data
WORKDIR /data
USER redis
EXPOSE 6379
CMD ["redis-server", "--protected-mode", "no"]
EOF
    # Debian's is older than the image that it stands for; it takes the same configuration and flags.
    "$PROMETHEUS_IMAGE") cat <<EOF ;;
FROM $BASE_IMAGE
RUN apt-get update && apt-get install -y --no-install-recommends prometheus wget \\
 && rm -rf /var/lib/apt/lists/* /etc/prometheus && mkdir -p /etc/prometheus /prometheus \\
 && chown -R nobody:nogroup /etc/prometheus /prometheus
VOLUME /prometheus
WORKDIR /prometheus
USER nobody
EXPOSE 9090
ENTRYPOINT ["/bin/prometheus"]
CMD ["--config.file=/etc/prometheus/prometheus.yml", "--storage.tsdb.path=/prometheus"]
EOF
    esac
}

# Stand-ins for those of some images that are not there.
make_standins() {
    has_image "$BASE_IMAGE" || make_base
    rm -rf "$STATE/standin" && mkdir -p "$STATE/standin/ca" && touch "$STATE/standin/ca/.keep"
    # What this machine trusts beside the usual authorities, so that pip in a build trusts it, too.
    cp /usr/local/share/ca-certificates/*.crt "$STATE/standin/ca/" 2>/dev/null || true
    local image
    for image in "$@"; do
        has_image "$image" || standin "$image" | build_standin "$image"
    done
}

up() {
    mkdir -p "$STATE"
    if ! answers && ! { command -v docker && command -v dockerd; } >/dev/null; then
        install_engine
    fi
    has_plugins || install_plugins
    answers || start_engine
    local image
    for image in "${images[@]}"; do
        if ! has_image "$image" && ! pull "$image"; then
            make_standins "${images[@]}"
            break
        fi
    done
    say "client $(docker version --format '{{.Client.Version}}, engine {{.Server.Version}}')," \
        "compose $(docker compose version --short)"
}

down() {
    [[ -f $STATE/dockerd.pid.ours ]] || return 0
    local pid
    pid=$(cat "$STATE/dockerd.pid.ours")
    rm -f "$STATE/dockerd.pid.ours"
    # Not another process that has the number by now.
    [[ $(cat "/proc/$pid/comm" 2>/dev/null) == dockerd ]] || return 0
    kill "$pid"
    for _ in $(seq 120); do
        kill -0 "$pid" 2>/dev/null || return 0
        sleep 0.5
    done
    say "dockerd ($pid) does not end" >&2
    return 1
}

images=("$PYTHON_IMAGE" "$REDIS_IMAGE")
case "$*" in
up) up ;;
"up prometheus")
    images+=("$PROMETHEUS_IMAGE")
    up
    ;;
down) down ;;
*) echo "usage: $0 up [prometheus] | down" >&2; exit 64 ;;
esac
