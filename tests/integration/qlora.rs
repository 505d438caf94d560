//! Runs with an adapter of a model whose weights are stored in NF4.

use super::harness::Place;
use super::ranks::{config, place, train};

const NF4: &str = "adapter={rank: 4, dropout: 0.2, parts: [llm, vision, merger], quantize: nf4}";

fn adapter(place: &Place, output: &str) -> Vec<u8> {
    place.read(&format!("{output}/final/adapter_model.safetensors"))
}

#[test]
fn ranks_and_recomputation_change_no_bit_of_an_adapter_of_a_quantised_model() {
    let place = place();
    let run = |output: &str, adapter: &str, world: usize, more: &[&str]| {
        train(&config(&place, output, &[&[adapter], more].concat()), world, None);
    };
    run("one", NF4, 1, &[]);
    run("plain", NF4, 1, &["adapter.quantize=none"]);
    assert_ne!(adapter(&place, "plain"), adapter(&place, "one"));
    run("recomputed", NF4, 1, &["model.recompute=full"]);
    run("two", NF4, 2, &["distributed.shard=gradients"]);
    for output in ["recomputed", "two"] {
        assert!(adapter(&place, output) == adapter(&place, "one"), "{output} differs");
    }
}
