use super::super::{Kind, Master, Named, state_bytes_per_weight};
use super::*;

const SHAPES: [[usize; 2]; 3] = [[3, 5], [64, 9], [5, 1000]];

fn random(seed: u64, shape: [usize; 2], dtype: DType) -> Tensor {
    let count = shape[0] * shape[1];
    let values =
        (0..count as u64).map(|i| ((i * 7919 + seed * 104_729) % 1009) as f32 / 504.5 - 1.0);
    let t = Tensor::from_vec(values.collect::<Vec<f32>>(), &shape, &Device::Cpu).unwrap();
    t.to_dtype(dtype).unwrap()
}

/// Parameters of these shapes, and their optimizer.
fn optimizer_of(place: Place, dtype: DType, config: &OptimConfig) -> (Vec<Param>, Optimizer) {
    let params: Vec<Param> = (0..)
        .zip(SHAPES)
        .map(|(i, shape)| Param::new(format!("p{i}"), i, random(i as u64, shape, dtype)))
        .collect();
    let named: Vec<_> =
        params.iter().map(|p| Named { name: p.name(), component: "llm", rank: 2 }).collect();
    let groups = ParamGroups::new(&named, &[], []).unwrap();
    let config = OptimConfig { weight_decay: 0.1, ..config.clone() };
    let master = |param: &Param, _: Range<usize>, _: &Device| {
        param.tensor()?.flatten_all()?.to_dtype(DType::F32)
    };
    let (all, owned) = ((&params[..], &groups), whole(&params, &groups));
    let optimizer = Optimizer::at(place, &config, 1.0, all, owned, master, &Device::Cpu).unwrap();
    (params, optimizer)
}

fn gradients(params: &[Param], step: u64) -> Vec<Tensor> {
    let grad = |(param, shape): (&Param, [usize; 2])| {
        let grad = random(100 * step + param.index() as u64, shape, DType::F32);
        grad.flatten_all().unwrap()
    };
    params.iter().zip(SHAPES).map(grad).collect()
}

/// Weights and moments.
fn state_of(optimizer: &Optimizer) -> Vec<Vec<f32>> {
    let state = optimizer.states().iter().flat_map(|state| {
        let tensors = state.tensors().map(|(_, tensor)| tensor.clone());
        let weight = state.param.tensor().unwrap().flatten_all().unwrap();
        let values = |t: Tensor| t.to_dtype(DType::F32).unwrap().to_vec1::<f32>().unwrap();
        [weight].into_iter().chain(tensors).map(values).collect::<Vec<_>>()
    });
    state.collect()
}

/// Weights and moments after some steps.
fn trained(place: Place, dtype: DType, config: &OptimConfig) -> Vec<Vec<f32>> {
    let (params, optimizer) = optimizer_of(place, dtype, config);
    for step in 1..=5 {
        let norm = optimizer.norm(gradients(&params, step)).unwrap();
        optimizer.finish(&optimizer.update(norm, 1e-2, step).unwrap()).unwrap();
    }
    state_of(&optimizer)
}

fn moments(moments: Moments) -> OptimConfig {
    OptimConfig { moments, ..OptimConfig::default() }
}

#[test]
fn state_on_the_host_gives_the_same_bits() {
    for dtype in [DType::F32, DType::BF16] {
        for kind in [Kind::Adamw, Kind::Adamw8bit] {
            for master in [Master::F32, Master::None] {
                let on = |place, moments| {
                    let config = OptimConfig { kind, moments, master, ..Default::default() };
                    trained(place, dtype, &config)
                };
                let device = on(Place::Device, Moments::F32);
                assert_eq!(on(Place::Host, Moments::Host), device);
                assert_eq!(on(Place::Device, Moments::Host), device);
                let before = random(0, SHAPES[0], dtype).to_dtype(DType::F32).unwrap();
                let before = before.flatten_all().unwrap().to_vec1::<f32>().unwrap();
                assert_ne!(device[0], before);
            }
        }
    }
}

#[test]
fn a_gradient_that_is_not_finite_changes_nothing_and_its_parameter_is_named() {
    for kind in [Kind::Adamw, Kind::Adamw8bit, Kind::Muon, Kind::Adafactor] {
        let config = OptimConfig { kind, ..OptimConfig::default() };
        let (params, optimizer) = optimizer_of(Place::Device, DType::BF16, &config);
        let run = |step: u64, bad: Option<f32>| {
            let mut grads = gradients(&params, step);
            if let Some(bad) = bad {
                let grad = Tensor::full(bad, 64 * 9, &Device::Cpu).unwrap();
                grads[1] = grad.contiguous().unwrap();
            }
            let update = optimizer.update(optimizer.norm(grads).unwrap(), 1e-2, step).unwrap();
            optimizer.finish(&update).unwrap().1.map(|problem| problem.to_string())
        };
        assert_eq!(run(1, None), None);
        let before = state_of(&optimizer);
        for bad in [f32::NAN, f32::INFINITY] {
            let problem = run(2, Some(bad)).unwrap();
            let named = "1 of 3 parameters is not finite, the first is `p1`";
            assert!(problem.ends_with(named), "{kind:?}: {problem}");
            assert_eq!(state_of(&optimizer), before, "{kind:?}, {bad}");
        }
        assert_eq!(run(2, None), None);
        assert_ne!(state_of(&optimizer), before, "{kind:?}");
    }
}

#[test]
fn narrow_moments_follow_those_in_f32() {
    let wide = trained(Place::Device, DType::F32, &moments(Moments::F32));
    let narrow = trained(Place::Device, DType::F32, &moments(Moments::Bf16));
    let config = OptimConfig { kind: Kind::Adamw8bit, ..OptimConfig::default() };
    let codes = trained(Place::Device, DType::F32, &config);
    assert_ne!(wide[1], narrow[1]);
    assert_eq!(wide[..3], codes[..3], "a small parameter");
    // weights of the parameter with 8-bit codes, whose steps have size 1e-2
    let (from, to) = (&wide[wide.len() - 3], &codes[codes.len() - 5]);
    assert_ne!(from, to);
    for (wide, narrow) in wide.iter().zip(&narrow).chain([(from, to)]) {
        for (wide, narrow) in wide.iter().zip(narrow) {
            assert!((wide - narrow).abs() < 0.02 * (0.1 + wide.abs()), "{wide} {narrow}");
        }
    }
}

#[test]
fn a_weight_has_the_bytes_of_its_state() -> anyhow::Result<()> {
    let bytes = |dtype: DType, config: OptimConfig| {
        let tensor = Tensor::zeros(1 << 16, dtype, &Device::Cpu).unwrap();
        let params = [Param::new("p".to_owned(), 0, tensor)];
        let named = [Named { name: "p", component: "llm", rank: 1 }];
        let groups = ParamGroups::new(&named, &[], []).unwrap();
        state_bytes_per_weight(&config, &params, &groups)
    };
    let bare = || OptimConfig { master: Master::None, ..OptimConfig::default() };
    assert_eq!(bytes(DType::F32, OptimConfig::default()), 8.0);
    assert_eq!(bytes(DType::F32, bare()), 8.0);
    assert_eq!(bytes(DType::BF16, OptimConfig::default()), 12.0);
    assert_eq!(bytes(DType::BF16, bare()), 8.0);
    assert_eq!(bytes(DType::BF16, OptimConfig { moments: Moments::Bf16, ..bare() }), 4.0);
    assert_eq!(bytes(DType::BF16, OptimConfig { kind: Kind::Adamw8bit, ..bare() }), 2.03125);
    // a vector; the rows and columns of a matrix
    let adafactor = || OptimConfig { kind: Kind::Adafactor, ..OptimConfig::default() };
    assert_eq!(bytes(DType::F32, adafactor()), 4.0);
    let params = [Param::new("p", 0, Tensor::zeros((2, 32, 64), DType::BF16, &Device::Cpu)?)];
    let groups = ParamGroups::new(&[Named { name: "p", component: "llm", rank: 3 }], &[], [])?;
    let expected = 4.0 + 4.0 * (32.0 + 64.0) / (32.0 * 64.0);
    assert_eq!(state_bytes_per_weight(&adafactor(), &params, &groups), expected);
    Ok(())
}
