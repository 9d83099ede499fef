# Set-up shared by tests/run.sh and examples/quickstart.sh. POSIX sh, sourced with ROOT set to the
# checkout. Functions: setup_venv EXTRAS, setup_one_adapter, setup_test_adapters.
# Everything it installs by itself needs root on a Debian-like system; elsewhere it says what to do.

VENV=$ROOT/.venv
VENV_PYTHON=$VENV/bin/python
VULKAN_PACKAGES="libvulkan1 mesa-vulkan-drivers"

say() { printf '%s\n' "$*" >&2; }

can_apt() { [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null 2>&1; }

# apt_install PACKAGE...: quiet unless it fails.
apt_install() {
    say "installing $*"
    log=$(mktemp)
    if { [ -n "${apt_updated-}" ] || apt-get update; } >"$log" 2>&1 &&
        DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends "$@" \
            >>"$log" 2>&1; then
        apt_updated=yes
        rm -f "$log"
    else
        tail -n 20 "$log" >&2
        rm -f "$log"
        say "could not install $*"
        return 1
    fi
}

# Prints a Python >= 3.11: $PYTHON if set, else the first that fits.
find_python() {
    for candidate in ${PYTHON:-python3 python3.14 python3.13 python3.12 python3.11}; do
        if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            command -v "$candidate"
            return 0
        fi
    done
    say "ort-webgpu needs Python 3.11 or newer (set PYTHON=/path/to/python3 to name one)"
    return 1
}

create_venv() {
    base=$(find_python) || return 1
    rm -rf "$VENV"
    if ! "$base" -m venv "$VENV" >/dev/null 2>&1; then
        # Debian splits ensurepip, which venv needs, from python3
        rm -rf "$VENV"
        version=$("$base" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
        if ! can_apt; then
            say "$base cannot make virtual environments; install python$version-venv"
            return 1
        fi
        apt_install "python$version-venv" || return 1
        "$base" -m venv "$VENV" || return 1
    fi
}

# setup_venv EXTRAS: $VENV holds an editable install with these extras (e.g. "examples" or
# "test,dev"). A stamp for each set of extras records what the install was made from, so that an
# unchanged checkout installs nothing again.
setup_venv() {
    "$VENV_PYTHON" -m pip --version >/dev/null 2>&1 || create_venv || return 1
    stamp=$VENV/installed-$(printf %s "$1" | tr , -)
    made_from="$ROOT $(cksum <"$ROOT/pyproject.toml") $("$VENV_PYTHON" --version)"
    if [ "$(cat "$stamp" 2>/dev/null)" != "$made_from" ]; then
        say "installing ort-webgpu[$1] into $VENV"
        "$VENV_PYTHON" -m pip install --quiet --disable-pip-version-check \
            --editable "${ROOT}[$1]" || return 1
        printf %s "$made_from" >"$stamp"
    fi
    # Without it the Vulkan loader's window system layers complain at each start
    if [ -z "${XDG_RUNTIME_DIR-}" ]; then
        XDG_RUNTIME_DIR=$VENV/run
        mkdir -p "$XDG_RUNTIME_DIR"
        chmod 700 "$XDG_RUNTIME_DIR"
        export XDG_RUNTIME_DIR
    fi
}

has_adapter() {
    "$VENV_PYTHON" -c 'import sys
from ort_webgpu.device import adapters
sys.exit(not adapters())' 2>/dev/null
}

# setup_one_adapter: a WebGPU adapter of any kind, Mesa's software one where there is none.
setup_one_adapter() {
    has_adapter && return 0
    # shellcheck disable=SC2086
    if can_apt && apt_install $VULKAN_PACKAGES && has_adapter; then
        return 0
    fi
    say "No WebGPU adapter found: attention will run on the CPU. Install your GPU's Vulkan driver,"
    say "or the software one (Debian, Ubuntu: apt-get install $VULKAN_PACKAGES)."
}

# first_file PATH...: the first that is a file.
first_file() {
    for path in "$@"; do
        if [ -f "$path" ]; then
            printf %s "$path"
            return 0
        fi
    done
    return 1
}

lavapipe_icd() { first_file /usr/share/vulkan/icd.d/lvp_icd.*.json /usr/share/vulkan/icd.d/lvp_icd.json; }

swiftshader_icd() {
    first_file /usr/lib/chromium/vk_swiftshader_icd.json /usr/lib64/chromium-browser/vk_swiftshader_icd.json \
        /opt/google/chrome/vk_swiftshader_icd.json
}

# setup_test_adapters: exports VK_DRIVER_FILES with the two software adapters that the tests run on.
# They differ in what breaks kernels (subgroup size, limits, f16). Left alone where the user set it.
setup_test_adapters() {
    [ -z "${VK_DRIVER_FILES-}${VK_ICD_FILENAMES-}" ] || return 0
    if can_apt; then
        # shellcheck disable=SC2086
        lavapipe_icd >/dev/null || apt_install $VULKAN_PACKAGES || true
        swiftshader_icd >/dev/null || apt_install libvulkan1 chromium || true
    fi
    files=
    for name in lavapipe swiftshader; do
        if icd=$("${name}_icd"); then
            files=${files:+$files:}$icd
        else
            say "adapter $name is missing, its tests are skipped (an error under CI=true)." \
                "On Debian: apt-get install libvulkan1 mesa-vulkan-drivers chromium"
        fi
    done
    [ -z "$files" ] && return 0
    VK_DRIVER_FILES=$files
    export VK_DRIVER_FILES
}
