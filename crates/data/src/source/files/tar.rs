//! WebDataset shards: tar archives in which the files of a row have the same name up to its first
//! dot and are next to each other.

use std::io::{self, Cursor, Read};
use std::path::Path;
use std::sync::Arc;

use serde_json::{Map, Value, json};
use tar::{Archive, Entry};

use super::json::{Hashing, RowIndex};
use crate::json;
use crate::source::raw_row::RawRow;
use crate::source::rows::{IMAGE_ENDINGS, VIDEO_ENDINGS, is_row};
use crate::source::source_error::SourceError;

/// Endings of images and sounds that are not read from archives; videos are not either.
const NOT_READ: [&str; 26] = [
    "heic", "heif", "avif", "jp2", "jxl", "svg", "jfif", "jpe", "ppm", "pgm", "pbm", "pnm", "tga",
    "ico", "apng", "psd", "exr", "hdr", "wav", "mp3", "flac", "ogg", "opus", "m4a", "aac", "wma",
];
/// Keys whose texts may name an image of the row.
const IMAGE_KEYS: [&str; 5] = ["image", "images", "path", "url", "image_url"];
/// Size of a header, and alignment of the data.
const BLOCK: u64 = 512;

/// Finds the rows of an archive. Line numbers are the numbers of the rows.
pub(super) fn scan(path: &Path, input: impl Read) -> Result<RowIndex, SourceError> {
    let broken = |rows: usize| {
        move |error: io::Error| {
            SourceError::broken(path, "a tar archive", &format!("after row {rows}: {error}"))
        }
    };
    let mut archive = Archive::new(Hashing::new(input));
    let mut index = RowIndex::default();
    let (mut end, mut last) = (0, None);
    for entry in archive.entries().map_err(broken(0))? {
        let entry = entry.map_err(broken(index.len()))?;
        let start = end; // of the headers of this file, a long name included
        end = entry.raw_file_position() + entry.size().div_ceil(BLOCK) * BLOCK;
        if let Some((key, _)) = key_and_ending(&entry).map_err(broken(index.len()))?
            && last.as_ref() != Some(&key)
        {
            index.push(start, index.len() as u64 + 1);
            last = Some(key);
        }
    }
    let finished = archive.into_inner().finish();
    let (num_bytes, sha256) =
        finished.map_err(|cause| SourceError::Read { path: path.to_owned(), cause })?;
    if num_bytes < end {
        return Err(broken(index.len())(io::ErrorKind::UnexpectedEof.into()));
    }
    Ok(index.finish(num_bytes, sha256))
}

/// The part of the path up to the first dot of the file name, and the rest in lower case. `None` if
/// this is not a file of a row.
fn key_and_ending(entry: &Entry<'_, impl Read>) -> io::Result<Option<(String, String)>> {
    let path = entry.path()?.to_string_lossy().into_owned();
    let (folder, name) = path.rsplit_once('/').unwrap_or(("", &path));
    let parts = name.split_once('.').filter(|(stem, _)| !stem.is_empty());
    let Some((stem, ending)) = parts.filter(|_| entry.header().entry_type().is_file()) else {
        return Ok(None);
    };
    Ok(Some((format!("{folder}/{stem}"), ending.to_ascii_lowercase())))
}

/// The row of the files in `bytes`, a part of an archive.
pub(super) fn row(bytes: &[u8]) -> Result<RawRow, String> {
    read_row(bytes).unwrap_or_else(|error| Err(error.to_string()))
}

fn read_row(bytes: &[u8]) -> io::Result<Result<RawRow, String>> {
    let mut archive = Archive::new(Cursor::new(bytes));
    let (mut object, mut caption, mut images) = (None, None, Vec::new());
    for entry in archive.entries()? {
        let mut entry = entry?;
        let Some((key, ending)) = key_and_ending(&entry)? else { continue };
        let name = format!("{}.{ending}", key.trim_start_matches('/'));
        let is_one_of =
            |endings: &[&str]| endings.contains(&ending.rsplit('.').next().unwrap_or(""));
        if is_one_of(&NOT_READ) || is_one_of(&VIDEO_ENDINGS) {
            return Ok(Err(format!("`{name}` is of a kind that is not read from archives")));
        }
        let is_image = is_one_of(&IMAGE_ENDINGS);
        if !is_image && ending != "json" && ending != "txt" {
            continue;
        }
        let mut content = Vec::with_capacity(entry.size() as usize);
        entry.read_to_end(&mut content)?;
        if is_image {
            images.push((name, Arc::from(content)));
            continue;
        }
        let failed = |problem: &str| Ok(Err(format!("`{name}` {problem}")));
        if ending == "txt" {
            let Ok(text) = String::from_utf8(content) else { return failed("is not UTF-8") };
            caption = Some(text);
        } else {
            match json::parse(&content) {
                Ok(Value::Object(value)) => object = Some(value),
                Ok(_) => return failed("is not a JSON object"),
                Err(error) => return failed(&format!("is not valid JSON: {error}")),
            }
        }
    }
    Ok(Ok(combine(object, caption, images)))
}

fn combine(
    object: Option<Map<String, Value>>,
    caption: Option<String>,
    images: Vec<(String, Arc<[u8]>)>,
) -> RawRow {
    let mut row = RawRow::default();
    let names: Vec<String> = images.iter().map(|(name, _)| name.clone()).collect();
    let blobs: Vec<Value> = images.into_iter().map(|(_, bytes)| row.blob_value(bytes)).collect();
    row.object = match (object, caption) {
        (Some(object), caption) if caption.is_none() || is_row(&object) => object,
        (_, Some(text)) if blobs.is_empty() => Map::from_iter([("text".to_owned(), text.into())]),
        // without a form, the row is rejected with its keys
        (_, None) => Map::new(),
        (_, Some(caption)) if caption.trim().is_empty() => Map::new(),
        (_, Some(caption)) => {
            let placeholders = "<image>".repeat(blobs.len());
            let messages = json!([
                {"role": "user", "content": placeholders},
                {"role": "assistant", "content": caption.trim()},
            ]);
            Map::from_iter([("messages".to_owned(), messages)])
        }
    };
    let mut is_used = false;
    // Other keys of the row do not hold images, so their texts remain.
    let is_read = |key: &String, value: &Value| {
        !value.is_string() || ["image", "images"].contains(&key.as_str())
    };
    for (key, value) in row.object.iter_mut().filter(|(key, value)| is_read(key, value)) {
        put_images(key, value, &names, &blobs, &mut is_used);
    }
    if !is_used && !blobs.is_empty() {
        row.object.insert("images".to_owned(), Value::Array(blobs));
    }
    row
}

/// Replaces the names of images by the images.
fn put_images(key: &str, value: &mut Value, names: &[String], blobs: &[Value], is_used: &mut bool) {
    match value {
        Value::Array(values) => {
            for value in values {
                put_images(key, value, names, blobs, is_used);
            }
        }
        Value::Object(object) => {
            for (key, value) in object {
                put_images(key, value, names, blobs, is_used);
            }
        }
        Value::String(text) if IMAGE_KEYS.contains(&key) => {
            let is_named = |name: &String| {
                name.eq_ignore_ascii_case(text)
                    || name.rsplit('/').next().is_some_and(|last| last.eq_ignore_ascii_case(text))
            };
            if let Some(image) = names.iter().position(is_named) {
                *value = blobs[image].clone();
                *is_used = true;
            }
        }
        _ => {}
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::source::raw_row::blob;

    fn archive(files: &[(&str, &str)]) -> Vec<u8> {
        let mut builder = tar::Builder::new(Vec::new());
        for (name, text) in files {
            let mut header = tar::Header::new_gnu();
            header.set_size(text.len() as u64);
            header.set_mode(0o644);
            builder.append_data(&mut header, name, text.as_bytes()).unwrap();
        }
        builder.into_inner().unwrap()
    }

    fn rows(bytes: &[u8]) -> Vec<RawRow> {
        let index = scan(Path::new("a.tar"), bytes).unwrap();
        let of = |row: usize| row_of(bytes, &index, row).unwrap();
        (0..index.len()).map(of).collect()
    }

    fn row_of(bytes: &[u8], index: &RowIndex, at: usize) -> Result<RawRow, String> {
        row(&bytes[index.start(at) as usize..index.end(at) as usize])
    }

    #[test]
    fn files_with_the_same_name_up_to_the_first_dot_are_one_row() {
        let long = format!("{}/0002", "folder".repeat(30));
        let (image, text) = (format!("{long}.png"), format!("{long}.txt"));
        let bytes = archive(&[
            ("a/0001.jpg", "JPEG"),
            ("a/0001.txt", "a moon\n"),
            ("a/0001.json", r#"{"width": 64}"#),
            (&image, "PNG"),
            (&text, "a sun"),
            ("0003.json", r#"{"messages": [{"image": "0003.seg.PNG"}, {"content": "0003.jpg"}]}"#),
            ("0003.seg.png", "two"),
            ("0004.txt", "only text"),
            ("0005.jpg", "JPEG"),
            ("0005.txt", "a star"),
            ("0005.json", r#"{"question": "What is it?", "answer": "a sun"}"#),
        ]);
        let rows = rows(&bytes);
        let caption = |text: &str| json!([{"role": "user", "content": "<image>"}, {"role": "assistant", "content": text}]);
        assert_eq!(rows.len(), 5);
        for (row, text, image) in [(&rows[0], "a moon", "JPEG"), (&rows[1], "a sun", "PNG")] {
            assert_eq!(row.object["messages"], caption(text));
            assert_eq!(blob(&row.blobs, &row.object["images"][0]).unwrap()[..], *image.as_bytes());
        }
        let named = &rows[2].object["messages"];
        assert_eq!(blob(&rows[2].blobs, &named[0]["image"]).unwrap()[..], *b"two");
        assert_eq!(named[1]["content"], "0003.jpg", "texts are not replaced");
        assert!(!rows[2].object.contains_key("images"));
        assert_eq!(Value::Object(rows[3].object.clone()), json!({"text": "only text"}));
        assert_eq!(rows[4].object["answer"], "a sun", "not the caption");
    }

    #[test]
    fn a_row_with_media_that_are_not_read_is_an_error() {
        let bytes = archive(&[("1.heic", "HEIC"), ("1.txt", "a moon")]);
        let index = scan(Path::new("a.tar"), &bytes[..]).unwrap();
        let error = row_of(&bytes, &index, 0).err().unwrap();
        assert_eq!(error, "`1.heic` is of a kind that is not read from archives");
    }

    #[test]
    fn an_image_without_a_caption_is_not_a_row_with_an_empty_answer() {
        let bytes = archive(&[
            ("1.jpg", "JPEG"),
            ("1.caption", "a moon"),
            ("2.jpg", "JPEG"),
            ("2.txt", " \n"),
        ]);
        for row in rows(&bytes) {
            let keys: Vec<&String> = row.object.keys().collect();
            assert_eq!(keys, ["images"], "a row without a form, which is rejected");
        }
    }

    #[test]
    fn an_image_named_by_a_key_that_is_not_read_is_kept() {
        let text = r#"{"file_name": "1.jpg", "path": "1.jpg", "query": "?", "response": "!"}"#;
        let row = &rows(&archive(&[("1.jpg", "JPEG"), ("1.json", text)]))[0];
        assert_eq!(blob(&row.blobs, &row.object["images"][0]).unwrap()[..], *b"JPEG");
        assert_eq!(row.object["file_name"], "1.jpg");
    }

    #[test]
    fn a_truncated_archive_and_broken_json_are_errors() {
        let bytes = archive(&[("1.json", "{}"), ("2.json", &"[".repeat(2000))]);
        let error = scan(Path::new("a.tar"), &bytes[..2048]).unwrap_err().to_string();
        assert!(error.contains("`a.tar`: a tar archive, but after row"), "{error}");
        let index = scan(Path::new("a.tar"), &bytes[..]).unwrap();
        assert!(row_of(&bytes, &index, 1).unwrap_err().starts_with("`2.json` is not valid JSON"));
    }
}
