#!/bin/sh
# Installs the program from an archive of a release, or replaces an older version of it:
#   sh install.sh [--prefix DIR] [--version V] [--cuda] [BASE]
#   sh install.sh --uninstall [--prefix DIR]
# BASE, or the variable TRAINER_BASE_URL, is the address or the folder that has the archives and SHA256SUMS.
#   --prefix DIR    has bin/trainer and share/ afterwards; default: ~/.local
#   --version V     which version, if BASE has several
#   --cuda          the binary for nodes with NVIDIA GPUs
#   --uninstall     removes the installed files, and folders that are then empty
# Needs curl or wget for an address. The prefix changes only after the archive has been checked. Each file is
# replaced as a whole and the binary last, so runs in progress continue with the binary that they started with.
set -eu
export LC_ALL=C

fail() { # message, hint, exit code
  printf 'error: %s\nhint: %s\n' "$1" "$2" >&2
  exit "$3"
}
usage() { fail "$1" 'sh install.sh [--prefix DIR] [--version V] [--cuda] [--uninstall] [BASE]' 64; }

prefix='' version='' variant='' uninstall='' base=${TRAINER_BASE_URL:-}
while [ $# -gt 0 ]; do
  case $1 in
    --prefix | --version) [ -n "${2:-}" ] || usage "\`$1\` needs a value" ;;
  esac
  case $1 in
    --prefix) prefix=$2 && shift ;;
    --version) version=$2 && shift ;;
    --cuda) variant=-cuda ;;
    --uninstall) uninstall=yes ;;
    -*) usage "unknown option \`$1\`" ;;
    *) base=$1 ;;
  esac
  shift
done
[ -n "$prefix" ] || prefix=${HOME:?is not set; pass --prefix}/.local
case $prefix in
  /*) ;;
  *) prefix=$PWD/$prefix ;;
esac
prefix=${prefix%/} base=${base%/}
# The names of the other installed files, one a line, relative to the prefix.
list=share/trainer/files
cannot() { fail "cannot write \`$prefix/$1\`" 'make it writable, or choose another --prefix, and run this again' 73; }

# Removes the files of the prefix that standard input names.
remove() {
  while IFS= read -r file; do
    rm -f -- "$prefix/$file" 2>/dev/null || cannot "$file"
    (cd "$prefix" && rmdir -p -- "$(dirname "$file")" 2>/dev/null) || true
  done
}
if [ -n "$uninstall" ]; then
  [ -f "$prefix/$list" ] || fail "there is no installation in \`$prefix\`" 'pass the --prefix of the installation' 66
  remove <"$prefix/$list"
  echo "$list" | remove
  echo "removed trainer from $prefix"
  exit 0
fi
[ -n "$base" ] || usage 'the address of the release is missing'
if [ -e "$prefix/bin/trainer" ] && [ ! -f "$prefix/$list" ]; then
  fail "\`$prefix/bin/trainer\` exists, and is not from an archive of a release" 'remove it, or choose another --prefix' 73
fi

# All work is in a new folder of the prefix: on the same file system, so that `mv` renames. After a failure, it
# is removed, and so are the folders above it that did not exist before.
made='' work='' child=''
part=$prefix
while [ ! -d "$part" ]; do
  made="$made$part
"
  part=$(dirname "$part")
done
clean() {
  [ -z "$child" ] || kill "$child" 2>/dev/null || true
  [ -z "$work" ] || rm -rf -- "$work"
  printf %s "$made" | while IFS= read -r part; do rmdir -- "$part" 2>/dev/null || break; done
}
trap clean EXIT
trap 'fail "stopped by a signal; nothing was installed" "run this again" 75' INT TERM HUP
{ mkdir -p -- "$prefix" && work=$(mktemp -d "$prefix/.trainer-install.XXXXXX"); } 2>/dev/null ||
  fail "cannot write to \`$prefix\`" 'choose a --prefix that you may write to' 73

# Copies a file of the release.
get() { # name, file
  case $base in
    http://* | https://*)
      # In the background, since a shell waits for other commands before it obeys a signal.
      if command -v curl >/dev/null; then
        curl --fail --silent --show-error --location --connect-timeout 30 --output "$2" "$base/$1" 2>"$work/errors" &
      elif command -v wget >/dev/null; then
        wget --no-verbose --tries 2 --timeout 30 --output-document "$2" "$base/$1" 2>"$work/errors" &
      else
        fail 'neither curl nor wget is installed' 'install one of them, or pass a folder that has the files' 69
      fi
      ;;
    *) cp -- "$base/$1" "$2" 2>"$work/errors" & ;;
  esac
  child=$!
  wait "$child" || fail "cannot get \`$base/$1\`: $(tail -n 1 "$work/errors")" 'check the address, the network and the disk, and run this again' 74
  child=''
}

get SHA256SUMS "$work/sums"
archives=$(sed -n 's/^[0-9a-f]\{64\} [ *]\(trainer-[0-9A-Za-z._-]*\.tar\.gz\)$/\1/p' "$work/sums" | tr '\n' ' ')
[ -n "$archives" ] || fail "\`$base/SHA256SUMS\` lists no archive" 'check the address' 65
system=$(uname -s | tr '[:upper:]' '[:lower:]')-$(uname -m)$variant
fitting=''
for name in $archives; do
  its_version=${name#trainer-} its_version=${its_version%"-$system.tar.gz"}
  [ "trainer-$its_version-$system.tar.gz" != "$name" ] || [ "${version:-$its_version}" != "$its_version" ] ||
    fitting="$fitting $name"
done
# shellcheck disable=SC2086 # names have no spaces
set -- $fitting
[ $# -gt 0 ] ||
  fail "there is no archive for $system${version:+ of version $version}; the release has: $archives" 'build from source: cargo install --locked --path .' 69
[ $# = 1 ] || fail "there are several archives for $system: $*" 'choose one with --version' 64
archive=$1

echo "downloading $archive"
get "$archive" "$work/archive"
expected=$(sed -n "s/^\([0-9a-f]\{64\}\) [ *]$archive\$/\1/p" "$work/sums")
found=$(sha256sum <"$work/archive" | cut -d ' ' -f 1)
[ "$found" = "$expected" ] || fail "\`$archive\` is damaged: its SHA-256 sum is $found, that of SHA256SUMS $expected" 'run this again; if the sums still differ, do not use the archive' 65
tar -xzf "$work/archive" -C "$work" 2>"$work/errors" || fail "cannot unpack \`$archive\`: $(tail -n 1 "$work/errors")" "check the free space of \`$prefix\`" 73
new=$work/${archive%.tar.gz}

needed=$(cat "$new/share/trainer/glibc" 2>/dev/null) || fail "\`$archive\` is not an archive of the program" 'check the address' 65
glibc=$(getconf GNU_LIBC_VERSION 2>/dev/null) || glibc='no glibc'
[ "$(printf '%s\n' "${glibc#glibc }" "$needed" | sort -V | head -n 1)" = "$needed" ] && [ "$glibc" != 'no glibc' ] ||
  fail "the binary needs glibc $needed or later, and this machine has $glibc" 'use a newer system or a container, or build from source: cargo install --locked --path .' 69
if ! shown=$("$new/bin/trainer" --version 2>&1); then
  case $variant$shown in
    # A login node has no driver.
    -cuda*'shared libraries'*) shown="${archive%.tar.gz}, which does not start on this machine (${shown##*shared libraries: })" ;;
    *) fail "the binary does not start: $shown" 'please report this with the output of uname -a' 70 ;;
  esac
fi

# From here on the prefix changes. The list has the files of both versions until all are replaced, so that
# neither a failure nor a lost machine leaves files that --uninstall does not find.
trap '' INT TERM HUP
made=''
if [ -f "$prefix/$list" ]; then sort "$prefix/$list" >"$work/old"; else : >"$work/old"; fi
sort -u "$new/$list" "$work/old" >"$work/both"
move() { # from, name
  { mkdir -p -- "$(dirname "$prefix/$2")" && mv -f -- "$1" "$prefix/$2"; } 2>/dev/null || cannot "$2"
}
move "$work/both" "$list"
while IFS= read -r file; do
  [ "$file" = bin/trainer ] || move "$new/$file" "$file"
done <"$new/$list"
move "$new/bin/trainer" bin/trainer
sort "$new/$list" | comm -13 - "$work/old" | remove
move "$new/$list" "$list"

echo "installed $shown in $prefix/bin"
case :$PATH: in
  *:"$prefix/bin":*) ;;
  *) echo "add $prefix/bin to PATH to start it by its name" ;;
esac
