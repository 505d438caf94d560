//! Compares our engine with the `tokenizers` crate: ids, offsets, decoded text, unsupported files.

use std::path::Path;
use std::time::{Duration, Instant};

use proptest::prelude::*;
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;
use serde_json::{Value, json};
use tokenizers::Tokenizer;

use super::*;

fn small_file() -> Vec<u8> {
    std::fs::read(concat!(
        env!("CARGO_MANIFEST_DIR"),
        "/../../data/quickstart/model/tokenizer.json"
    ))
    .unwrap()
}

/// One file, loaded by our engine and by the `tokenizers` crate.
struct Both {
    ours: TextTokenizer,
    reference: Tokenizer,
}

impl Both {
    fn of(bytes: &[u8]) -> Self {
        let path = Path::new("tokenizer.json");
        let ours = TextTokenizer::from_bytes(path, bytes).unwrap();
        assert!(matches!(ours.inner, Inner::Ours(_)), "our engine does not support the file");
        Self { ours, reference: reference(path, bytes).unwrap() }
    }

    fn small() -> Self {
        Self::of(&small_file())
    }

    /// A tokenizer with each of the split patterns.
    fn each() -> [Self; 2] {
        let path = "/../../tests/golden/models/small-qwen35/tokenizer.json";
        let path = [env!("CARGO_MANIFEST_DIR"), path].concat();
        [Self::small(), Self::of(&std::fs::read(path).unwrap())]
    }

    fn check(&self, text: &str) -> usize {
        let tokens = self.ours.encode(text).unwrap();
        let expected = self.reference.encode(text, false).unwrap();
        assert_eq!(tokens.ids, expected.get_ids(), "ids of {text:?}");
        assert_eq!(tokens.offsets, expected.get_offsets(), "offsets of {text:?}");
        tokens.ids.len()
    }
}

/// Texts at the edges of the rules: normalisation, splitting, added tokens.
const PIECES: [&str; 66] = [
    "a",
    "The",
    "ing",
    " the",
    "token",
    "\u{4e2d}\u{6587}",
    "\u{6f22}",
    "\u{3042}",
    "\u{d55c}\u{ae00}",
    "\u{1112}\u{1161}\u{11ab}",
    "\u{e9}",
    "e\u{301}",
    "\u{301}",
    "\u{323}\u{301}",
    "\u{344}",
    "\u{958}",
    "\u{915}\u{93c}",
    "\u{212b}",
    "\u{f900}",
    "\u{2f800}",
    "\u{1d15e}",
    "\u{5e9}\u{5c1}",
    "\u{e01}\u{e33}",
    "\u{e38}",
    "q\u{307}\u{323}",
    "\u{1ed}",
    "1",
    "42",
    "\u{660}",
    "\u{b2}",
    "\u{216b}",
    "\u{1d7d8}",
    "'",
    "'s",
    "'S",
    "'ll",
    "'Re",
    "'\u{17f}",
    "\u{2019}s",
    " ",
    "  ",
    "    ",
    "\t",
    "\n",
    "\r\n",
    "\r",
    "\u{a0}",
    "\u{3000}",
    "\u{2028}",
    "\u{200b}",
    "\u{feff}",
    "!",
    "?!",
    "...",
    "\u{3002}",
    "{\"",
    "</",
    "_",
    "\u{1f600}",
    "\u{1f468}\u{200d}\u{1f469}",
    "\u{0}",
    "<|im_start|>",
    "<|im_end|>\n",
    "<|image_pad|>",
    "<|im_",
    "<think>",
];

#[test]
fn edge_case_texts_have_the_ids_and_offsets_of_the_reference() {
    for both in Both::each() {
        let tokens = |text: &str| both.check(text);
        assert_eq!(tokens(""), 0);
        assert_eq!(tokens("<|im_start|><|im_start|>"), 2);
        for piece in PIECES {
            tokens(piece);
            for other in PIECES {
                tokens(&format!("{piece}{other}"));
                tokens(&format!("x{other}{piece} {other}y"));
            }
        }
        tokens("Cafe\u{301} 123 don't <|im_end|><|im_end|><|image_pad|>x<|image_pad");
        tokens(&"<|image_pad|>".repeat(500));
    }
}

#[test]
fn every_character_has_the_class_of_the_reference() {
    for both in Both::each() {
        let all: Vec<char> = ('\0'..=char::MAX).filter(|c| (*c as u32) < 0x32000).collect();
        for chunk in all.chunks(64) {
            let text: String =
                chunk.iter().flat_map(|c| ['a', *c, 'b', ' ', *c, '1', '\'', *c]).collect();
            both.check(&text);
        }
    }
}

#[test]
fn documents_have_the_ids_and_offsets_of_the_reference() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    for both in Both::each() {
        for name in
            ["README.md", "docs/data-format.md", "crates/tokenizer/src/file.rs", "Cargo.toml"]
        {
            let text = std::fs::read_to_string(root.join(name)).unwrap();
            assert!(both.check(&text) > 100);
            both.check(&text.replace('\n', "\r\n"));
        }
    }
}

#[test]
fn decoded_texts_equal_the_reference() {
    let both = Both::small();
    let mut rng = ChaCha8Rng::seed_from_u64(5);
    for _ in 0..500 {
        let len = rng.random_range(0..20);
        let ids: Vec<u32> = (0..len).map(|_| rng.random_range(0..2100)).collect(); // 2,043 exist
        for skip in [false, true] {
            let expected = both.reference.decode(&ids, skip).unwrap();
            assert_eq!(both.ours.decoded(&ids, skip).unwrap(), expected, "{ids:?}");
        }
    }
    assert_eq!(both.ours.max_id(), 2042);
    for id in [0, 100, 2016, 2017, 2042, 2043, u32::MAX] {
        assert_eq!(both.ours.token(id), both.reference.id_to_token(id));
        let token = both.reference.id_to_token(id).unwrap_or_default();
        assert_eq!(both.ours.id(&token), both.reference.token_to_id(&token));
    }
}

#[test]
fn no_text_takes_quadratic_time() {
    let tokenizer = Both::small().ours;
    for piece in [
        "a",
        "ab",
        " ",
        "\n",
        " \n",
        "\u{4e2d}",
        "!",
        "1",
        "e\u{301}",
        "\u{301}\u{323}",
        "<|im_",
        "'",
        "<",
    ] {
        let text = piece.repeat(1_000_000 / piece.len());
        let began = Instant::now();
        let tokens = tokenizer.encode(&text).unwrap();
        assert_eq!(tokens.offsets.last().map(|offset| offset.1 <= text.len()), Some(true));
        // a step that takes quadratic time needs minutes for a million bytes
        assert!(began.elapsed() < Duration::from_secs(10), "{piece:?}: {:?}", began.elapsed());
    }
}

#[test]
fn a_text_of_too_many_tokens_is_tokenised_only_until_this_is_certain() {
    let tokenizer = Both::small().ours;
    let text = "7<|im_end|>e\u{301}".repeat(1000);
    let whole = tokenizer.encode(&text).unwrap();
    let num = whole.ids.len();
    assert_eq!(tokenizer.encode_up_to(&text, num).unwrap(), whole);
    let some = tokenizer.encode_up_to(&text, num - 1).unwrap();
    assert!(some.ids.len() > num - 1, "it must be seen that there are more");
    let few = tokenizer.encode_up_to(&text, 100).unwrap();
    assert!((101..110).contains(&few.ids.len()), "{}", few.ids.len());
    assert_eq!(few.ids, whole.ids[..few.ids.len()]);
}

#[test]
fn unsupported_files_are_run_by_the_tokenizers_crate() {
    let file: Value = serde_json::from_slice(&small_file()).unwrap();
    let with = |pointer: &str, value: Value| {
        let mut file = file.clone();
        *file.pointer_mut(pointer).unwrap() = value;
        serde_json::to_vec(&file).unwrap()
    };
    let ours = |bytes: &[u8]| {
        let tokenizer = TextTokenizer::from_bytes(Path::new("t.json"), bytes).unwrap();
        let expected = reference(Path::new("t.json"), bytes).unwrap();
        let text = "Don't  stop <|im_end|> Cafe\u{301}\n 12";
        assert_eq!(
            tokenizer.encode(text).unwrap().ids,
            expected.encode(text, false).unwrap().get_ids()
        );
        let is_ours = matches!(tokenizer.inner, Inner::Ours(_));
        assert_eq!(tokenizer.max_bytes(), if is_ours { 4 << 20 } else { 1 << 19 });
        is_ours
    };
    for (pointer, value) in [
        ("/normalizer", json!({"type": "NFKC"})),
        ("/normalizer", Value::Null),
        ("/pre_tokenizer/pretokenizers/0/pattern/Regex", json!(r"\p{N}{1,3}|\s+|[^\s\p{N}]+")),
        ("/pre_tokenizer/pretokenizers/0/behavior", json!("Removed")),
        ("/pre_tokenizer/pretokenizers/1/add_prefix_space", json!(true)),
        ("/model/ignore_merges", json!(true)),
        ("/model/byte_fallback", json!(true)),
        ("/model/unk_token", json!("!")),
        ("/added_tokens/1/lstrip", json!(true)),
        ("/added_tokens/1/id", json!(9999)),
    ] {
        assert!(!ours(&with(pointer, value)), "{pointer}");
    }
    for (pointer, value) in [
        ("/pre_tokenizer/pretokenizers/1/trim_offsets", json!(true)),
        ("/post_processor", Value::Null),
        ("/added_tokens/1/normalized", json!(true)),
        ("/model/continuing_subword_prefix", json!("")),
    ] {
        assert!(ours(&with(pointer, value)), "{pointer}");
    }
    // older files write merges as strings
    let merges = file["model"]["merges"].as_array().unwrap().iter();
    let merges =
        merges.map(|pair| format!("{} {}", pair[0].as_str().unwrap(), pair[1].as_str().unwrap()));
    assert!(ours(&with("/model/merges", merges.collect())));
    assert!(TextTokenizer::from_bytes(Path::new("t.json"), b"{}").is_err());
}

#[test]
fn a_tokenizer_that_draws_tokens_at_random_is_refused() {
    let mut file: Value = serde_json::from_slice(&small_file()).unwrap();
    file["model"]["dropout"] = json!(0.5);
    let bytes = serde_json::to_vec(&file).unwrap();
    let error = TextTokenizer::from_bytes(Path::new("t.json"), &bytes).unwrap_err();
    assert_eq!(
        error.to_string(),
        "`t.json`: `model.dropout` is 0.5: byte pair encoding with dropout is not supported"
    );
    file["model"]["dropout"] = json!(0.0);
    TextTokenizer::from_bytes(Path::new("t.json"), &serde_json::to_vec(&file).unwrap()).unwrap();
}

/// Tokens and ids of transformers: `scripts/golden/new_tokens.py`.
fn added_by_transformers() -> (Vec<u8>, Value) {
    let golden = concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/golden/");
    let read = |name: &str| std::fs::read([golden, name].concat()).unwrap();
    let expected: Value = serde_json::from_slice(&read("new_tokens.json")).unwrap();
    let tokens: Vec<NewToken> = [("add_tokens", false), ("add_special_tokens", true)]
        .into_iter()
        .flat_map(|(key, special)| {
            let list = expected[key].as_array().unwrap().iter();
            list.map(move |text| NewToken { content: text.as_str().unwrap().to_owned(), special })
        })
        .collect();
    let file = read("models/small-tied/tokenizer.json");
    let grown = with_new_tokens(Path::new("t.json"), &file, &tokens).unwrap();
    assert_eq!((grown.first_id, grown.added.len(), grown.present.len()), (2043, 8, 0));
    let again = with_new_tokens(Path::new("t.json"), &grown.bytes, &tokens).unwrap();
    assert_eq!((again.bytes == grown.bytes, again.added.len(), again.present), (true, 0, tokens));
    (grown.bytes, expected)
}

#[test]
fn new_tokens_have_the_ids_of_transformers_and_our_engine_finds_them() {
    let (bytes, expected) = added_by_transformers();
    let both = Both::of(&bytes);
    let texts = expected["texts"].as_array().unwrap();
    for (text, ids) in
        texts.iter().zip(expected["models"]["small-tied"]["texts"].as_array().unwrap())
    {
        let text = text.as_str().unwrap();
        both.check(text);
        assert_eq!(json!(both.ours.encode(text).unwrap().ids), *ids, "{text:?}");
    }
    for (id, skipped) in [(2043, "<box>"), (2044, "\u{fc}nit \u{e9}"), (2047, "")] {
        assert_eq!(both.ours.decode(&[id]).unwrap(), skipped);
        assert_eq!(both.reference.decode(&[id], true).unwrap(), skipped);
    }
}

#[test]
fn a_new_token_that_would_never_be_found_or_is_another_token_is_refused() {
    let problem = |content: &str, special| {
        let tokens = [NewToken { content: content.to_owned(), special }];
        with_new_tokens(Path::new("t.json"), &small_file(), &tokens).err()
    };
    let taken = |id, as_what| Some(NewTokenProblem::Taken { token: 0, id, as_what });
    assert_eq!(problem("<|im_end|>", false), taken(2019, "a special token"));
    assert_eq!(problem("<think>", true), taken(2041, "an added token that is not special"));
    assert_eq!(problem("the", false), taken(477, "a token of its byte pair encoding"));
    let found = problem("a<|im_end|>", false);
    assert_eq!(found, Some(NewTokenProblem::NotFound { token: 0, ids: vec![64, 2019] }));
    assert_eq!(problem("a<|im_end|>", true), None, "it is longer, and found in the text as it is");
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn random_mixtures_of_edge_cases_have_the_ids_and_offsets_of_the_reference(
        mixtures in prop::collection::vec(prop::collection::vec(0..PIECES.len(), 0..40), 20)
    ) {
        let (bytes, golden) = added_by_transformers();
        let texts: Vec<&str> =
            golden["texts"].as_array().unwrap().iter().map(|text| text.as_str().unwrap()).collect();
        for both in Both::each().into_iter().chain([Both::of(&bytes)]) {
            for pieces in &mixtures {
                both.check(&pieces.iter().map(|piece| PIECES[*piece]).collect::<String>());
                both.check(&pieces.iter().map(|piece| texts[piece % texts.len()]).collect::<String>());
            }
        }
    }
}

/// Compares ids, offsets and speed on any tokenizer and corpus; see `scripts/bench/tokenizer.sh`.
#[test]
#[ignore = "needs TOKENIZER_JSON and CORPUS, a list of text files"]
fn a_published_tokenizer_has_the_ids_and_offsets_of_the_reference_and_is_faster() {
    let bytes = std::fs::read(std::env::var("TOKENIZER_JSON").unwrap()).unwrap();
    let seconds = |began: Instant| began.elapsed().as_secs_f64();
    let began = Instant::now();
    drop(TextTokenizer::from_bytes(Path::new("t.json"), &bytes).unwrap());
    let ours = seconds(began);
    let began = Instant::now();
    drop(reference(Path::new("t.json"), &bytes).unwrap());
    eprintln!("load: ours {ours:.3} s, tokenizers {:.3} s", seconds(began));

    let both = Both::of(&bytes);
    let mut rng = ChaCha8Rng::seed_from_u64(1);
    for _ in 0..20_000 {
        let len = rng.random_range(1..40);
        let text: String = (0..len)
            .map(|_| match rng.random_range(0..4) {
                0 => char::from_u32(rng.random_range(0..0x3_0000)).unwrap_or('x').to_string(),
                1 => both.ours.decode_with_specials(&[rng.random_range(0..150_000)]).unwrap(),
                _ => PIECES[rng.random_range(0..PIECES.len())].to_owned(),
            })
            .collect();
        both.check(&text);
    }
    eprintln!("20,000 fuzz strings: identical ids and offsets");

    for name in std::env::var("CORPUS").unwrap().split_whitespace() {
        let text = std::fs::read_to_string(name).unwrap();
        let mut chunks = Vec::new();
        let mut rest = text.as_str();
        while !rest.is_empty() {
            let (chunk, after) = rest.split_at(rest.floor_char_boundary(4000.min(rest.len())));
            chunks.push(chunk);
            rest = after;
        }
        let tokens: usize = chunks.iter().map(|chunk| both.check(chunk)).sum();
        let rate = |encode: &dyn Fn(&str)| {
            let best = (0..3).map(|_| {
                let began = Instant::now();
                for chunk in &chunks {
                    encode(chunk);
                }
                seconds(began)
            });
            text.len() as f64 / 1e6 / best.fold(f64::INFINITY, f64::min)
        };
        let cold = TextTokenizer::from_bytes(Path::new("t.json"), &bytes).unwrap();
        let began = Instant::now();
        for chunk in &chunks {
            drop(cold.encode(chunk).unwrap());
        }
        let first = text.len() as f64 / 1e6 / seconds(began);
        let ours = rate(&|chunk| drop(both.ours.encode(chunk).unwrap()));
        let theirs = rate(&|chunk| drop(both.reference.encode(chunk, false).unwrap()));
        eprintln!(
            "{name}: {:.1} MB, {tokens} tokens, identical; MB/s: ours {ours:.1} (cold cache {first:.1}), \
             tokenizers {theirs:.2}, ratio {:.1}",
            text.len() as f64 / 1e6,
            ours / theirs
        );
    }
}
