#!/usr/bin/env bash
# Packs a built binary into an archive of a release, and its bill of materials next to it:
#   scripts/release/pack.sh OUT BINARY                   OUT/trainer-VERSION-linux-x86_64.tar.gz, .cdx.json
#   scripts/release/pack.sh OUT BINARY cuda OTHER        the same with -cuda, for a binary with that feature; the
#                                                        manual is that of OTHER, which starts without a driver
# FEATURES has the features of other builds. An archive is a tree for a prefix such as /usr/local. The same
# binary and commit give the same bytes: names are sorted, and all files have the time of the commit (or
# SOURCE_DATE_EPOCH) and belong to root.
set -euo pipefail
cd "$(dirname "$0")/../.."
export LC_ALL=C
mkdir -p "$1"
out=$(cd "$1" && pwd) binary=$2 variant=${3:-} manual_of=${4:-$2}
version=$(sed -n 's/^version = "\(.*\)"/\1/p' Cargo.toml | head -n 1)
time=${SOURCE_DATE_EPOCH:-$(git log -1 --format=%ct)}
name=trainer-$version-linux-x86_64${variant:+-$variant}
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
tree=$folder/$name
share=$tree/share
mkdir -p "$tree/bin" "$share"/{trainer,doc/trainer,bash-completion/completions,zsh/site-functions,fish/vendor_completions.d}

strip -o "$tree/bin/trainer" "$binary"
# The highest version of glibc whose symbols the binary needs.
objdump -T "$tree/bin/trainer" | grep -o 'GLIBC_[0-9.]*' | cut -d_ -f2 | sort -Vu | tail -n 1 >"$share/trainer/glibc"
"$manual_of" completions bash >"$share/bash-completion/completions/trainer"
"$manual_of" completions zsh >"$share/zsh/site-functions/_trainer"
"$manual_of" completions fish >"$share/fish/vendor_completions.d/trainer.fish"
"$manual_of" man --out "$share/man/man1" 2>/dev/null
# Messages of the program name these files.
git ls-files -z README.md LICENSE CHANGELOG.md docs configs 'scripts/trackers/read_*.py' |
  tar --null -T - -c | tar -C "$share/doc/trainer" -x
SOURCE_DATE_EPOCH=$time python3 scripts/release/sbom.py "${FEATURES-$variant}" "$share/doc/trainer/licenses.txt" >"$share/trainer/sbom.cdx.json"
(cd "$tree" && find . -type f | cut -c 3- | sort) >"$folder/files"
mv "$folder/files" "$share/trainer/files"

tar -C "$folder" -c --sort=name --format=ustar --mtime="@$time" --owner=0 --group=0 --numeric-owner --mode=u=rwX,go=rX "$name" |
  gzip -n >"$folder/archive"
mv "$folder/archive" "$out/$name.tar.gz"
cp "$share/trainer/sbom.cdx.json" "$out/$name.cdx.json"
cp scripts/release/install.sh "$out"
(cd "$out" && sha256sum -- trainer-* install.sh) >"$folder/sums"
mv "$folder/sums" "$out/SHA256SUMS"
echo "$name.tar.gz: $(stat -c %s "$out/$name.tar.gz") bytes, glibc $(cat "$share/trainer/glibc") or later"
