#!/bin/sh
# Fails if a source or documentation file contains a banned phrase, and prints each place with a
# better phrase. The list keeps comments, messages and test names in plain technical English. Also
# fails if a line of a documentation file has more than 100 characters.
#   scripts/check_prose.sh            prints file:line of each banned phrase and each long line
#   scripts/check_prose.sh --count    prints the number of lines of each phrase instead
set -eu
cd "$(dirname "$0")/.."
count=no
[ "${1:-}" != --count ] || count=yes

# scope @ phrase (Perl's regular expression, any case) @ use instead @ files that may contain it
# `all` searches whole lines; `prose` searches comments, strings and names of functions in code, and
# whole lines in documentation. An underscore counts as a space, so that test names are searched.
list() {
  cat <<'LIST'
all @ heard|hears @ has a gradient; receives @
all @ told @ reported; is passed @
prose @ tells?|telling @ returns; reports; distinguishes @ scripts/golden/minicpm_rows.py
all @ foretold|foretells?|foresees?|foreseen|foresight @ predict; plan @
all @ pictures? @ image @ (scripts/golden/(chat|video)_cases.py|crates/data/src/source/rows/keys.rs|docs/data-format.md|tests/integration/image_columns.rs)
all @ towers? @ vision encoder @ (src/(convert|config/other_trainers)|crates/(engine/src/(models/(internvl|minicpm)|nn/tensor_names)|convert/src/compose/model)|scripts/golden/(internvl|minicpm)|tests/(golden/README|integration/(internvl|minicpm))|docs/checkpoints|tests/(integration|fixtures)/convert|docs/migration)[^:]*
prose @ beside @ next to; in the background @
all @ whoever @ callers @
prose @ (what|whatever) becomes? of @ how .. is handled @
all @ put up with @ tolerated @
prose @ (gives?|gave|given|giving) up @ stop; may be overwritten @
prose @ [a-z]*([^e]|[^r]e) is no (run|row|token|number|image|glob|text|answer|chunk|config|list|folder|file|video|markup|space|reason|change|burden|failure|complete|positive|multiple) @ is not a @
prose @ eats?|ate|eaten @ reads; takes as input @
prose @ complain(s|ed|ing)? @ report; warn @
prose @ never (is|are|was|has) @ is never @
all @ as ops compute @ a whole sentence @
prose @ what it (is|does)\. @ a sentence that adds information, or no comment @
prose @ not among the @ is missing from @
prose @ ask|asks|asked|asking @ requests; calls; requires @ scripts/golden/video_cases.py
prose @ met @ found; read; occurred @
prose @ the walk of|data walk|the walk from @ data flow @
prose @ begun @ started @
prose @ anew @ again; from scratch @
prose @ (goes|gone|going|went|to go) on|go on from @ continues; resumes @
all @ honest|honestly @ model_flops; exact @
prose @ lent|lends? @ view; borrowed @
prose @ nobody|no one @ no other thread; no caller @
prose @ who (waits|wants|looks|asks|reads|relies|only) @ a process that; callers that @
prose @ a matter of @ state the time or the size @
prose @ dies|died @ ends; fails @
prose @ lives @ is stored; exists @
prose @ knows @ has; stores; supports @
prose @ (looks|looked|looking) at @ reads; checks @
prose @ wants @ requires @
prose @ but for @ except for @
prose @ (of|in|with|after|for|at) so many @ number of @
prose @ pass(ed|es) over @ skipped @
prose @ comes? true @ is correct @
prose @ in silence @ silently @
prose @ (config|file|log|row|header|manifest|key|code|error|message|page) says @ contains; is; reports @
prose @ (its|the|model's|behind a) doors? @ input; interface @
prose @ of those that @ of the .. that @
prose @ stands? for @ means; represents; matches; is @
LIST
}

places() {
  for place in src crates tests scripts configs docs .ci build.rs Cargo.toml ./*.md; do
    [ ! -e "$place" ] || printf '%s\n' "$place"
  done
}

# Prints `file:line:text` of the lines that contain the phrase.
search() { # scope, phrase
  word=$(printf '%s' "$2" | sed 's/ /[ _]/g')
  word="(?<![[:alnum:]])($word)(?![[:alnum:]])"
  code=$word
  [ "$1" = all ] || code="(//|#|\"|fn ).*$word"
  # The list of places has no spaces.
  # shellcheck disable=SC2046
  {
    grep -rniP --include='*.md' --include='*.py' "$word" $(places) || true
    grep -rniP --include='*.rs' --include='*.cu' --include='*.cuh' --include='*.cpp' --include='*.h' \
      --include='*.sh' --include='*.yaml' --include='*.toml' --include=run "$code" $(places) || true
  } | grep -v '^scripts/check_prose.sh:'
}

# Prints `file:line` of each line of a page that is too long. Tables, code blocks and lines of one
# word, such as an address, may be longer. awk counts bytes, so the bytes after the first one of a
# character are removed.
long_lines() {
  # shellcheck disable=SC2046
  LC_ALL=C awk '
    FNR == 1 { is_code = 0 }
    { start = $0; sub(/^[ \t]+/, "", start) }
    start ~ /^```/ { is_code = !is_code }
    is_code || start ~ /^[|#<!]/ { next }
    { characters = $0; gsub(/[\200-\277]/, "", characters); sub(/^- /, "", start) }
    length(characters) > 100 && start ~ /[ \t]/ { print FILENAME ":" FNR ": more than 100 characters" }
  ' ./*.md $(find docs -name '*.md')
}

found=$(
  list | while IFS=@ read -r scope phrase instead except; do
    scope=$(printf '%s' "$scope" | tr -d ' ') phrase=${phrase# } phrase=${phrase% }
    instead=${instead# } instead=${instead% } except=$(printf '%s' "$except" | tr -d ' ')
    lines=$(search "$scope" "$phrase" | grep -vE "^(${except:-/}):" || true)
    [ -n "$lines" ] || continue
    if [ "$count" = yes ]; then
      printf '%5d  %s\n' "$(printf '%s\n' "$lines" | wc -l)" "$phrase"
    else
      printf '%s\n' "$lines" | sed "s|^\(\./\)*\([^:]*:[0-9]*\):[[:space:]]*\(.*\)|\2: use \`$instead\`: \3|"
    fi
  done
  [ "$count" = yes ] || long_lines
)
[ -n "$found" ] || exit 0
printf '%s\n' "$found"
[ "$count" = yes ] || echo "error: the lines above contain banned phrases (scripts/check_prose.sh has the list) or are too long" >&2
exit 1
