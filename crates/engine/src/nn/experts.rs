//! Sizes of a mixture of experts, and the tensors of its layers.
//!
//! Shapes: `E` experts, `k` of them for each token, `I` their width, `D` hidden size.

use super::init::Init;
use super::params::{ParamSpec, Stored};
use super::routers::Routers;
use kernels::ExpertLayout;

/// Module of the experts of a layer.
pub(super) const EXPERTS: &str = "mlp.experts";
/// Module of the expert that computes every token.
pub(super) const SHARED: &str = "mlp.shared_expert";
/// Linear layer of its gate.
pub(super) const SHARED_GATE: &str = "mlp.shared_expert_gate";
/// Weight of the router of a layer.
pub(super) const ROUTER: &str = "mlp.gate.weight";

/// Sizes of the experts of a layer, which a router selects for each token.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MoeConfig {
    /// Number of experts of a layer, `E`.
    pub num_experts: usize,
    /// Number of experts that compute a token, `k`.
    pub experts_per_token: usize,
    /// Width of an expert, `I`.
    pub intermediate_size: usize,
    /// Width of an expert that computes every token, times the sigmoid of a gate; `None`: there is
    /// none.
    pub shared_size: Option<usize>,
    /// How weight files have the tensors of the experts.
    pub files: ExpertFiles,
}

/// How weight files have the tensors of the experts. A run saves them as it found them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ExpertFiles {
    /// `gate_up_proj [E, D, 2I]` and `down_proj [E, I, D]`, as Qwen3-VL was published.
    InOut,
    /// `gate_up_proj [E, 2I, D]` and `down_proj [E, D, I]`, as Qwen3.5 was published.
    OutIn,
    /// `N.gate_proj.weight [I, D]`, `N.up_proj.weight [I, D]` and `N.down_proj.weight [D, I]` of
    /// each expert `N`, as Qwen3 was published.
    Separate,
}

impl MoeConfig {
    pub(super) fn layout(&self) -> ExpertLayout {
        match self.files {
            ExpertFiles::InOut => ExpertLayout::InOut,
            ExpertFiles::OutIn | ExpertFiles::Separate => ExpertLayout::OutIn,
        }
    }

    /// Shapes of `gate_up_proj` and `down_proj` in memory.
    fn shapes(&self, hidden: usize) -> [[usize; 3]; 2] {
        let (experts, inner) = (self.num_experts, self.intermediate_size);
        match self.layout() {
            ExpertLayout::InOut => [[experts, hidden, 2 * inner], [experts, inner, hidden]],
            ExpertLayout::OutIn => [[experts, 2 * inner, hidden], [experts, hidden, inner]],
        }
    }

    /// Number of weights of a layer's experts that a token is not multiplied with.
    pub(super) fn idle_weights(&self, hidden: usize) -> usize {
        3 * (self.num_experts - self.experts_per_token) * self.intermediate_size * hidden
    }

    /// The routers of `num_layers` layers.
    pub(super) fn routers(&self, num_layers: usize) -> Routers {
        let (num_experts, experts_per_token) = (self.num_experts, self.experts_per_token);
        Routers { num_experts, experts_per_token, num_layers }
    }

    /// The same sizes, with the layout of weight files; `shape_of` is the shape of a tensor in the
    /// files. Unchanged if the files have none of the layouts. `layer` is the name of a layer with
    /// experts.
    #[must_use]
    pub fn of_files(
        &self,
        hidden: usize,
        layer: &str,
        shape_of: &dyn Fn(&str) -> Option<Vec<usize>>,
    ) -> Self {
        let part = |part: &str| shape_of(&format!("{layer}.{EXPERTS}.{part}"));
        if part("0.gate_proj.weight").is_some() {
            return Self { files: ExpertFiles::Separate, ..*self };
        }
        let found = ["gate_up_proj", "down_proj"].map(part);
        // One of the two tensors may be square, but not both.
        let fits = |files: &ExpertFiles| {
            let shapes = Self { files: *files, ..*self }.shapes(hidden);
            let found = found.iter().zip(&shapes);
            found.clone().all(|(found, shape)| found.as_deref() == Some(&shape[..]))
        };
        let files = [ExpertFiles::InOut, ExpertFiles::OutIn].into_iter().find(fits);
        // The comparison of all shapes names a tensor that does not fit.
        let published = if self.files == ExpertFiles::Separate && found[0].is_some() {
            ExpertFiles::OutIn
        } else {
            self.files
        };
        Self { files: files.unwrap_or(published), ..*self }
    }
}

pub(super) fn sparse_specs(
    moe: &MoeConfig,
    hidden: usize,
    add: &mut dyn FnMut(&str, &[usize], Init),
) {
    let [gate_up, down] = moe.shapes(hidden);
    add(ROUTER, &[moe.num_experts, hidden], Init::Normal);
    add(&format!("{EXPERTS}.gate_up_proj"), &gate_up, Init::Normal);
    add(&format!("{EXPERTS}.down_proj"), &down, Init::Normal);
    if let Some(inner) = moe.shared_size {
        add(&format!("{SHARED}.gate_proj.weight"), &[inner, hidden], Init::Normal);
        add(&format!("{SHARED}.up_proj.weight"), &[inner, hidden], Init::Normal);
        add(&format!("{SHARED}.down_proj.weight"), &[hidden, inner], Init::Normal);
        add(&format!("{SHARED_GATE}.weight"), &[1, hidden], Init::Normal);
    }
}

/// How the tensor `part` of a layer is stored.
pub(super) fn stored(moe: Option<&MoeConfig>, part: &str) -> Stored {
    match moe.filter(|_| part.starts_with(EXPERTS)).map(|moe| moe.files) {
        Some(ExpertFiles::Separate) => Stored::PerExpert,
        Some(ExpertFiles::InOut) => Stored::InOut,
        Some(ExpertFiles::OutIn) | None => Stored::Whole,
    }
}

impl ParamSpec {
    /// Whether the tensor has the weights of all experts of a layer.
    pub fn is_experts(&self) -> bool {
        self.shape.len() == 3 && self.name.contains(EXPERTS)
    }

    pub fn expert_layout(&self) -> Option<ExpertLayout> {
        let is_in_out = self.stored == Stored::InOut;
        let layout = if is_in_out { ExpertLayout::InOut } else { ExpertLayout::OutIn };
        self.is_experts().then_some(layout)
    }

    /// Numbers of experts, of outputs and of inputs of the weights of experts.
    pub fn expert_sizes(&self) -> Option<[usize; 3]> {
        let [experts, rows, columns] = self.shape[..] else { return None };
        Some(match self.expert_layout()? {
            ExpertLayout::OutIn => [experts, rows, columns],
            ExpertLayout::InOut => [experts, columns, rows],
        })
    }

    /// Names and shapes of the tensors that weight files have in place of this one. In row-major
    /// order, its elements are those of the first, then those of the second and so on. Empty if the
    /// files have the tensor itself.
    pub fn pieces(&self) -> Vec<(String, Vec<usize>)> {
        let (Stored::PerExpert, [experts, rows, columns]) = (self.stored, &self.shape[..]) else {
            return Vec::new();
        };
        let (module, tensor) = self.name.rsplit_once('.').unwrap_or(("", &self.name));
        let parts: &[&str] = match tensor {
            "gate_up_proj" => &["gate_proj", "up_proj"],
            part => &[part],
        };
        let shape = vec![rows / parts.len(), *columns];
        let of = |expert: usize| {
            let shape = shape.clone();
            let name = move |part: &&str| format!("{module}.{expert}.{part}.weight");
            parts.iter().map(move |part| (name(part), shape.clone()))
        };
        (0..*experts).flat_map(of).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashMap;

    const LAYER: &str = "model.layers.1";

    fn config(files: ExpertFiles, inner: usize) -> MoeConfig {
        MoeConfig {
            num_experts: 3,
            experts_per_token: 2,
            intermediate_size: inner,
            shared_size: None,
            files,
        }
    }

    /// Names and shapes of a layer's tensors in files.
    fn in_files(moe: &MoeConfig, hidden: usize) -> HashMap<String, Vec<usize>> {
        let mut specs = Vec::new();
        sparse_specs(moe, hidden, &mut |part, shape, init| {
            specs.push(ParamSpec {
                name: format!("{LAYER}.{part}"),
                shape: shape.to_vec(),
                component: super::super::Component {
                    name: "llm",
                    inputs: super::super::Inputs::All,
                },
                init,
                stored: stored(Some(moe), part),
            });
        });
        let files = specs.iter().flat_map(|spec| match spec.pieces() {
            pieces if pieces.is_empty() => vec![(spec.name.clone(), spec.shape.clone())],
            pieces => pieces,
        });
        files.collect()
    }

    #[test]
    fn the_layout_is_recognised_by_the_shapes_also_of_square_tensors() {
        let all = [ExpertFiles::InOut, ExpertFiles::OutIn, ExpertFiles::Separate];
        // in the second size `gate_up_proj` is square, in the third `down_proj`
        for (hidden, inner) in [(10, 4), (8, 4), (4, 4)] {
            for (expected, published) in
                all.iter().flat_map(|of| all.map(|published| (of, published)))
            {
                let files = in_files(&config(*expected, inner), hidden);
                let shape_of = |name: &str| files.get(name).cloned();
                let found = config(published, inner).of_files(hidden, LAYER, &shape_of);
                assert_eq!(found.files, *expected, "{hidden} x {inner} from {published:?}");
            }
        }
        let found = config(ExpertFiles::InOut, 4).of_files(10, LAYER, &|_| None);
        assert_eq!(found.files, ExpertFiles::InOut);
    }

    #[test]
    fn the_tensors_of_each_expert_follow_each_other() {
        let files = in_files(&config(ExpertFiles::Separate, 4), 10);
        let mut names: Vec<_> = files.into_iter().collect();
        names.sort();
        assert_eq!(names.len(), 1 + 3 * 3);
        let expected = (format!("{LAYER}.mlp.experts.0.down_proj.weight"), vec![10, 4]);
        assert_eq!(names[0], expected);
        let expected = (format!("{LAYER}.mlp.experts.0.gate_proj.weight"), vec![4, 10]);
        assert_eq!(names[1], expected);
    }
}
