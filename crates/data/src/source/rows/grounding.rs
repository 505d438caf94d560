//! Boxes and names of objects, with the keys of ms-swift.

use serde_json::{Map, Value};

use super::super::error::SampleFault;
use super::super::grounding_error::GroundingError;
use super::super::texts::{BOX_PLACEHOLDER, NAME_PLACEHOLDER, texts};
use super::context::At;
use super::keys::is_given;
use super::values::{join, missing, not_supported, one_or_more, take, text, wrong_type};
use batch::{BoxRef, BoxUnit, Message, Objects};

const COORDINATES: &str = "a list of four numbers (a box) or two (a point)";

impl At<'_> {
    /// Takes the objects of a row, and checks that `messages` have one placeholder for each.
    pub(super) fn objects(
        &self,
        row: &mut Map<String, Value>,
        messages: &[Message],
    ) -> Result<Objects, SampleFault> {
        let objects = match take(row, "objects") {
            value if !is_given(&value) => {
                if self.parser.rules.literal_placeholders {
                    return Ok(Objects::default());
                }
                Objects::default()
            }
            Value::Object(object) => listed_objects(object)?,
            other => return Err(wrong_type("objects", &other, "an object with `bbox`")),
        };
        let count = |placeholder: &str| -> usize {
            texts(messages).map(|text| text.matches(placeholder).count()).sum()
        };
        for (placeholder, key, listed) in [
            (BOX_PLACEHOLDER, "bbox", objects.boxes.len()),
            (NAME_PLACEHOLDER, "ref", objects.names.len()),
        ] {
            let placeholders = count(placeholder);
            if placeholders != listed {
                return Err(GroundingError::Count { placeholder, placeholders, key, listed }.into());
            }
        }
        Ok(objects)
    }
}

fn listed_objects(mut object: Map<String, Value>) -> Result<Objects, SampleFault> {
    let known = ["ref", "bbox", "bbox_type", "image_id"];
    if let Some((key, _)) = object.iter().find(|(key, _)| !known.contains(&key.as_str())) {
        let what = "keys of objects other than `ref`, `bbox`, `bbox_type` and `image_id` are";
        return Err(not_supported(&join("objects", key), what));
    }
    let name = |(index, value)| text(&format!("objects.ref[{index}]"), value);
    let names = list(take(&mut object, "ref")).into_iter().enumerate();
    let unit = take(&mut object, "bbox_type");
    let has_unit = !unit.is_null();
    let unit = match unit {
        Value::Null => BoxUnit::Pixel,
        value => match text("objects.bbox_type", value)?.as_str() {
            "real" => BoxUnit::Pixel,
            "norm1" => BoxUnit::One,
            "norm1000" => BoxUnit::Thousandth,
            other => {
                return Err(GroundingError::Unit { found: other.to_owned() }.into());
            }
        },
    };
    let images = list(take(&mut object, "image_id"));
    let boxes = match take(&mut object, "bbox") {
        Value::Null => Vec::new(),
        Value::Array(boxes) => boxes,
        other => return Err(wrong_type("objects.bbox", &other, "a list of boxes")),
    };
    if images.len() > boxes.len() {
        let at = format!("objects.bbox[{}]", boxes.len());
        return Err(missing(&at, "a box for each entry of `objects.image_id`"));
    }
    let of_box = |(index, value): (usize, &Value)| {
        let at = format!("objects.bbox[{index}]");
        let numbers = value.as_array().map(|list| list.iter().map(Value::as_f64).collect());
        let coordinates: Option<Vec<f64>> = numbers.flatten();
        let coordinates = coordinates.filter(|numbers| [2, 4].contains(&numbers.len()));
        let coordinates = coordinates.ok_or_else(|| wrong_type(&at, value, COORDINATES))?;
        // as in ms-swift, boxes without an entry are in the first image
        let image = images.get(index).map_or(Ok(0), |image| {
            let number = image.as_u64().and_then(|image| usize::try_from(image).ok());
            let at = format!("objects.image_id[{index}]");
            number.ok_or_else(|| wrong_type(&at, image, "the index of an image"))
        })?;
        Ok(BoxRef { coordinates, unit, image })
    };
    let boxes =
        boxes.iter().enumerate().map(of_box).collect::<Result<Vec<BoxRef>, SampleFault>>()?;
    let coordinates = || boxes.iter().flat_map(|of| &of.coordinates);
    let has_fraction = coordinates().any(|of| of.fract() != 0.0);
    let is_doubtful = !has_unit || (unit != BoxUnit::One && has_fraction);
    if is_doubtful && !boxes.is_empty() && coordinates().all(|of| (0.0..=1.0).contains(of)) {
        return Err(GroundingError::Fractions.into());
    }
    let has_no_area = |of: &BoxRef| match of.coordinates[..] {
        [x1, y1, x2, y2] => x1 == x2 || y1 == y2,
        _ => false,
    };
    if let Some(index) = boxes.iter().position(has_no_area) {
        let found = format!("{:?}", boxes[index].coordinates);
        return Err(GroundingError::NoArea { index, found }.into());
    }
    Ok(Objects { names: names.map(name).collect::<Result<_, _>>()?, boxes })
}

/// The entries of a list, or a single value; empty for null.
fn list(value: Value) -> Vec<Value> {
    if value.is_null() { Vec::new() } else { one_or_more(value) }
}
