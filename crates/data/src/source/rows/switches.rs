//! Keys of turns and rows that decide how much they count in the loss.

use serde_json::{Map, Value};

use super::super::error::SampleFault;
use super::values::{join, not_supported, take, wrong_type};

/// Keys that say whether to train.
const TRAIN_KEYS: [&str; 3] = ["train", "loss", "trainable"];
/// Keys with a factor of the loss.
const WEIGHT_KEYS: [&str; 2] = ["weight", "loss_scale"];

/// The factor of the loss that the keys of a row or of an assistant turn give: their product, 1
/// without such a key.
pub(super) fn weight(at: &str, object: &mut Map<String, Value>) -> Result<f32, SampleFault> {
    let mut weight = 1.0;
    for key in TRAIN_KEYS {
        match take(object, key) {
            Value::Null | Value::Bool(true) => {}
            Value::Bool(false) => weight = 0.0,
            other => return Err(wrong_type(&join(at, key), &other, "a boolean")),
        }
    }
    for key in WEIGHT_KEYS {
        weight *= match take(object, key) {
            Value::Null => 1.0,
            value => factor(&join(at, key), &value)?,
        };
    }
    Ok(weight)
}

/// The factor of the loss of a turn of another role, which only `loss_scale: all` trains on: 0
/// if a key excludes the turn, else 1. The keys must not request training.
pub(super) fn other_weight(at: &str, object: &mut Map<String, Value>) -> Result<f32, SampleFault> {
    const WHAT: &str = "training on a turn other than the assistant's is";
    let mut weight = 1.0;
    for key in TRAIN_KEYS {
        match take(object, key) {
            Value::Null => {}
            Value::Bool(false) => weight = 0.0,
            Value::Bool(true) => return Err(not_supported(&join(at, key), WHAT)),
            other => return Err(wrong_type(&join(at, key), &other, "a boolean")),
        }
    }
    for key in WEIGHT_KEYS {
        let (value, at) = (take(object, key), join(at, key));
        if value.is_null() {
            continue;
        }
        match factor(&at, &value)? {
            0.0 => weight = 0.0,
            1.0 => {} // the usual default
            _ => return Err(not_supported(&at, WHAT)),
        }
    }
    Ok(weight)
}

fn factor(at: &str, value: &Value) -> Result<f32, SampleFault> {
    let factor = value.as_f64().map(|factor| factor as f32);
    factor
        .filter(|factor| factor.is_finite() && *factor >= 0.0)
        .ok_or_else(|| wrong_type(at, value, "a number of 0 or more"))
}
