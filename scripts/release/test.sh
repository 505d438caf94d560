#!/usr/bin/env bash
# Packs a built binary, and installs it with install.sh from a server on this machine: new, over an older
# version, and from damaged, incomplete, missing and interrupted downloads, which must change nothing.
#   scripts/release/test.sh                              packs target/release/trainer
#   TRAINER=target/ci/trainer scripts/release/test.sh    another binary
# FEATURES has the features of the binary, if they are not the default ones.
set -euo pipefail
cd "$(dirname "$0")/../.."
export LC_ALL=C
umask 022
# The downloads are from this machine. Not the variables of other addresses: cargo may need a proxy.
export no_proxy=127.0.0.1 NO_PROXY=127.0.0.1
unset TRAINER_BASE_URL
trainer=$(realpath "${TRAINER:-target/release/trainer}")
folder=$(mktemp -d)
chmod 755 "$folder"
server='' runs=''
trap 'echo "error: line $LINENO of scripts/release/test.sh failed" >&2' ERR
trap 'kill $server $runs 2>/dev/null || true; rm -rf "$folder"' EXIT

# The same bytes, whatever the clock, the umask and the times of files.
scripts/release/pack.sh "$folder/release" "$trainer"
(umask 077 && TZ=Asia/Tokyo scripts/release/pack.sh "$folder/again" "$trainer" >/dev/null)
diff -r "$folder/release" "$folder/again"
archive=$(cd "$folder/release" && ls trainer-*.tar.gz)
name=${archive%.tar.gz}
version=${name%-linux-x86_64} version=${version#trainer-}
(cd "$folder/release" && sha256sum --quiet -c SHA256SUMS)
mkdir "$folder/tree"
tar -C "$folder/tree" -xzf "$folder/release/$archive"
tree=$folder/tree/$name
shown=$("$tree/bin/trainer" --version) # such as `trainer 0.1.0 (without GPU code)`
[[ $shown == "trainer $version"* ]]
diff <(cd "$tree" && find . -type f ! -path ./share/trainer/files | cut -c 3- | sort) "$tree/share/trainer/files"
[ -z "$(find "$tree" ! -type d ! -type f)" ]
[ -z "$(nm "$tree/bin/trainer" 2>/dev/null)" ] # no symbols
for file in LICENSE README.md licenses.txt docs/install.md configs/quickstart.yaml; do [ -s "$tree/share/doc/trainer/$file" ]; done
bash -n "$tree/share/bash-completion/completions/trainer"
grep -q '^#compdef trainer' "$tree/share/zsh/site-functions/_trainer"
grep -q 'complete -c trainer' "$tree/share/fish/vendor_completions.d/trainer.fish"
[ -s "$tree/share/man/man1/trainer-sft.1" ]

# Every package whose code names its source file in the binary is in the bill, and each has what readers need.
python3 - "$tree" <<'END'
import json, re, sys
from pathlib import Path
tree = Path(sys.argv[1])
bill = json.loads((tree / "share/trainer/sbom.cdx.json").read_text())
parts = {part["bom-ref"]: part for part in [bill["metadata"]["component"], *bill["components"]]}
assert len(parts) == 1 + len(bill["components"]), "two components have one name"
edges = {entry["ref"]: entry["dependsOn"] for entry in bill["dependencies"]}
reached, left = set(), [bill["metadata"]["component"]["bom-ref"]]
while left:
    ref = left.pop()
    if ref not in reached:
        reached.add(ref)
        left += edges.get(ref, [])
assert reached == set(parts), f"not reached or no component: {reached ^ set(parts)}"
for part in bill["components"]:
    assert part["licenses"][0]["expression"], part
    if "purl" in part:
        assert part["purl"] == f"pkg:cargo/{part['name']}@{part['version']}", part
        assert re.fullmatch("[0-9a-f]{64}", part["hashes"][0]["content"]), part
binary = (tree / "bin/trainer").read_bytes()
named = {f"{name.decode()}@{version.decode()}" for name, version in re.findall(rb"registry/src/[^/]+/([A-Za-z0-9_-]+)-(\d+\.\d+\.\d+[^/]*)/", binary)}
assert len(named) > 40, f"the binary names only {len(named)} packages"
assert named <= set(parts), f"in the binary, but not in its bill: {named - set(parts)}"
for name in ["clap_derive", "proptest", "cc", "zlib-rs"]:
    assert not any(part["name"] == name for part in parts.values()), f"not in the binary: {name}"
print(f"{len(parts)} components, of which the binary names {len(named)}")
END

# Serves the releases of $folder/web, and with faults at other addresses.
cat >"$folder/server.py" <<'END'
import sys, time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        fault, _, rest = self.path.strip("/").partition("/")
        path = Path(sys.argv[1], rest)
        if fault == "moved":
            self.send_response(302)
            self.send_header("Location", f"/good/{rest}")
            self.end_headers()
            return
        if not path.is_file() or "//" in self.path:
            self.send_error(404)
            return
        data = path.read_bytes()
        self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if fault == "good" or path.name == "SHA256SUMS":
            self.wfile.write(data)
            return
        self.wfile.write(data[: len(data) // 2])
        self.wfile.flush()
        if fault == "slow":
            Path(sys.argv[1], "half").touch()
            time.sleep(60)
    def log_message(self, *args):
        pass
server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
server.daemon_threads = True
print(f"http://127.0.0.1:{server.server_port}", flush=True)
server.serve_forever()
END
web=$folder/web
mkdir "$web"
cp -r "$folder/release" "$web/release"
python3 "$folder/server.py" "$web" >"$folder/address" &
server=$!
for _ in {1..1200}; do [ -s "$folder/address" ] && break || sleep 0.05; done
address=$(cat "$folder/address")
good=$address/good/release

# A release of some archives, whose sums are correct.
release() { # folder, archives..
  local to=$web/$1
  mkdir -p "$to"
  cp "${@:2}" "$to"
  (cd "$to" && sha256sum -- trainer-* >SHA256SUMS)
}
# An archive whose tree has been changed by a command.
repack() { # archive, name of its tree, command
  rm -rf "$folder/changed"
  mkdir "$folder/changed"
  cp -r "$tree" "$folder/changed/$2"
  (cd "$folder/changed/$2" && eval "$3" && find . -type f ! -path ./share/trainer/files | cut -c 3- >share/trainer/files)
  tar -C "$folder/changed" -c "$2" | gzip -1 >"$1"
}
# Programs that are found before those of the system.
mkdir "$folder/stand_ins"
stand_in() { # name, output
  printf '#!/bin/sh\necho "%s"\n' "$2" >"$folder/stand_ins/$1"
  chmod +x "$folder/stand_ins/$1"
}
state() { find "$HOME" \( -type d -printf '%p\n' \) -o -printf '%p %i %s %T@\n' | sort; }
pass() { echo "ok: $*"; }
install() { sh "$web/release/install.sh" "$@"; }
# The installation fails with a message and a code, and changes nothing.
refused() { # case, code, message, arguments..
  local before status=0
  before=$(state)
  install "${@:4}" >"$folder/output" 2>&1 || status=$?
  if [ "$status" != "$2" ] || ! grep -q -- "^error: .*$3" "$folder/output" || ! grep -q '^hint: ' "$folder/output"; then
    printf 'error: %s: exit code %s, expected %s and `%s`:\n' "$1" "$status" "$2" "$3"
    cat "$folder/output"
    exit 1
  fi
  [ "$(state)" = "$before" ] || { echo "error: $1: files have changed" && diff <(echo "$before") <(state); exit 1; }
  pass "$1"
}
export HOME=$folder/home
mkdir "$HOME"

# All failures, twice: without an installation, and with one of an older version, which must still run.
repack "$folder/trainer-0.0.9-linux-x86_64.tar.gz" trainer-0.0.9-linux-x86_64 \
  'printf "#!/bin/sh\nsleep \${1#--version} 2>/dev/null; echo trainer 0.0.9\n" >bin/trainer; echo old >share/doc/trainer/docs/removed_since.md'
release older "$folder/trainer-0.0.9-linux-x86_64.tar.gz"
release both "$folder/trainer-0.0.9-linux-x86_64.tar.gz" "$folder/release/$archive"
cp -r "$web/release" "$web/damaged"
printf X | dd of="$web/damaged/$archive" bs=1 seek=100000 conv=notrunc status=none
mkdir "$web/no_sums" && cp "$folder/release/$archive" "$web/no_sums"
release unpackable "$folder/release/$archive"
head -c 100000 "$folder/release/$archive" >"$web/unpackable/$archive"
(cd "$web/unpackable" && sha256sum -- trainer-* >SHA256SUMS)
mkdir "$web/page" && echo '<html>log in first</html>' >"$web/page/SHA256SUMS"
repack "$folder/$archive" "$name" 'printf "#!/bin/sh\necho broken >&2; exit 1\n" >bin/trainer'
release broken "$folder/$archive"
repack "$folder/$archive" another 'rm -r bin'
release foreign "$folder/$archive"
for prefix in "$HOME/a new prefix/of two levels" "$HOME/an older version"; do
  case $prefix in *older*)
    install --prefix "$prefix" "$address/good/older" >/dev/null
    [ "$("$prefix/bin/trainer" --version)" = "trainer 0.0.9" ]
  esac
  refused "a wrong sum" 65 "is damaged: its SHA-256 sum is" --prefix "$prefix" "$address/good/damaged"
  refused "a truncated download" 74 "cannot get .*$archive" --prefix "$prefix" "$address/short/release"
  refused "no sums" 74 "cannot get .*no_sums/SHA256SUMS.*404" --prefix "$prefix" "$address/good/no_sums"
  refused "a page in place of the sums" 65 "SHA256SUMS. lists no archive" --prefix "$prefix" "$address/good/page"
  refused "no server" 74 "cannot get" --prefix "$prefix" "http://127.0.0.1:1"
  refused "a folder without a release" 74 "cannot get .*No such file" --prefix "$prefix" "$folder/tree"
  refused "an archive that ends early" 73 "cannot unpack" --prefix "$prefix" "$address/good/unpackable"
  refused "a binary that does not start" 70 "does not start: broken" --prefix "$prefix" "$address/good/broken"
  refused "an archive of something else" 65 "is not an archive of the program" --prefix "$prefix" "$address/good/foreign"
  refused "several versions" 64 "several archives for linux-x86_64: trainer-0.0.9" --prefix "$prefix" "$address/good/both"
  refused "a version that is missing" 69 "no archive for linux-x86_64 of version 7; the release has: trainer-$version" --version 7 --prefix "$prefix" "$good"
  refused "no binary with CUDA" 69 "no archive for linux-x86_64-cuda; the release has: $archive" --cuda --prefix "$prefix" "$good"
  refused "no address" 64 "address of the release is missing" --prefix "$prefix"
  for system in "Darwin arm64" "Linux aarch64"; do
    printf '#!/bin/sh\ncase $1 in -s) echo %s ;; -m) echo %s ;; esac\n' $system >"$folder/stand_ins/uname"
    chmod +x "$folder/stand_ins/uname"
    PATH=$folder/stand_ins:$PATH refused "$system" 69 "no archive for $(echo "${system,,}" | tr ' ' -); " --prefix "$prefix" "$good"
  done
  rm "$folder/stand_ins/uname"
  stand_in getconf "glibc 2.9"
  PATH=$folder/stand_ins:$PATH refused "an old glibc" 69 "needs glibc 2[.0-9]* or later, and this machine has glibc 2.9" --prefix "$prefix" "$good"
  printf '#!/bin/sh\nexit 1\n' >"$folder/stand_ins/getconf"
  PATH=$folder/stand_ins:$PATH refused "no glibc" 69 "this machine has no glibc" --prefix "$prefix" "$good"
  rm "$folder/stand_ins/getconf"
  for signal in INT TERM HUP; do
    before=$(state)
    rm -f "$web/half"
    # Ctrl-C reaches a script in the foreground; commands in the background ignore it from their start.
    python3 -c 'import os, signal, sys; signal.signal(signal.SIGINT, signal.SIG_DFL); os.execvp("sh", ["sh", *sys.argv[1:]])' \
      "$web/release/install.sh" --prefix "$prefix" "$address/slow/release" >"$folder/output" 2>&1 &
    runs=$!
    for _ in {1..1200}; do [ -e "$web/half" ] && break || sleep 0.05; done
    [ -d "$(echo "$prefix"/.trainer-install.*)" ] # on the file system of the prefix
    kill -s "$signal" "$runs"
    status=0
    wait "$runs" || status=$?
    runs=''
    [ "$status" = 75 ] && grep -q '^error: stopped by a signal; nothing was installed' "$folder/output"
    [ "$(state)" = "$before" ] || { echo "error: SIG$signal left files" && exit 1; }
    for _ in {1..100}; do grep -qs "$address/slow" /proc/[0-9]*/cmdline || break; sleep 0.05; done
    ! grep -s "$address/slow" /proc/[0-9]*/cmdline || { echo "error: the download continues" && exit 1; }
    pass "SIG$signal during the download"
  done
done

# A system folder, as another user than root.
user=()
[ "$(id -u)" != 0 ] || user=(setpriv --reuid 65534 --regid 65534 --clear-groups)
mkdir "$folder/system"
chmod 555 "$folder/system"
install() { ${user[@]+"${user[@]}"} sh "$web/release/install.sh" "$@"; }
refused "no permission to write" 73 "cannot write to .*system" --prefix "$folder/system/usr" "$good"
install() { sh "$web/release/install.sh" "$@"; }

# Over the older version, while it runs.
prefix="$HOME/an older version"
echo mine >"$prefix/share/doc/trainer/mine.md"
"$prefix/bin/trainer" 2 >"$folder/old_run" &
runs=$!
install --prefix "$prefix" "$address/moved/release" | tee "$folder/output"
grep -qxF "installed $shown in $prefix/bin" "$folder/output"
wait "$runs"
runs=''
[ "$(cat "$folder/old_run")" = "trainer 0.0.9" ]
[ "$("$prefix/bin/trainer" --version)" = "$shown" ]
rm "$prefix/share/doc/trainer/mine.md"
diff -r "$tree" "$prefix"
pass "an older version is replaced, its other files are removed"
install --prefix "$prefix" "$good" >/dev/null
diff -r "$tree" "$prefix"
pass "the same version again"
install --uninstall --prefix "$prefix"
[ -z "$(ls -A "$prefix")" ]
refused "nothing to uninstall" 66 "there is no installation" --uninstall --prefix "$prefix"

# The default prefix, the address from the environment, with other files in the prefix; wget; a folder.
mkdir -p "$HOME/.local/bin"
echo mine >"$HOME/.local/bin/other"
before=$(state)
(cd / && TRAINER_BASE_URL=$good/ install) >"$folder/output"
grep -q "^add $HOME/.local/bin to PATH" "$folder/output"
[ "$("$HOME/.local/bin/trainer" --version)" = "$shown" ]
install --uninstall >/dev/null
[ "$(state)" = "$before" ]
pass "the default prefix, and uninstalling"
echo mine >"$HOME/.local/bin/trainer"
refused "another file of this name" 73 "exists, and is not from an archive" "$good"
rm "$HOME/.local/bin/trainer"
mkdir "$folder/few"
for tool in cat comm cp cut diff dirname find getconf grep gzip head mkdir mktemp mv rm rmdir sed sh sha256sum sort tail tar tr uname; do
  ln -s "$(command -v "$tool")" "$folder/few/$tool"
done
PATH=$folder/few refused "neither curl nor wget" 69 "neither curl nor wget is installed" "$good"
(cd "$HOME" && PATH=$folder/few install --prefix relative --version "$version" "$web/both" >"$folder/output")
grep -q "^installed .* in $HOME/relative/bin" "$folder/output"
diff -r "$tree" "$HOME/relative"
pass "a folder in place of an address, and a relative prefix"
if command -v wget >/dev/null; then
  ln -s "$(command -v wget)" "$folder/few/wget"
  PATH=$folder/few install --prefix "$HOME/wget" "$good" >/dev/null
  diff -r "$tree" "$HOME/wget"
  PATH=$folder/few refused "a truncated download with wget" 74 "cannot get" --prefix "$HOME/wget" "$address/short/release"
  pass "wget"
else
  echo "skipped: there is no wget"
fi

# The archive with CUDA where the driver's library is missing: a note, since a login node has none.
repack "$folder/$name-cuda.tar.gz" "$name-cuda" \
  'printf "#!/bin/sh\necho \"trainer: error while loading shared libraries: libcuda.so.1: no such file\" >&2; exit 127\n" >bin/trainer'
release cuda "$folder/$name-cuda.tar.gz" "$folder/release/$archive"
install --cuda --prefix "$HOME/cuda" "$address/good/cuda" >"$folder/output"
grep -q "^installed $name-cuda, which does not start on this machine (libcuda.so.1: no such file) in" "$folder/output"
pass "the binary with CUDA without a driver"
echo "all installations behave as expected"
