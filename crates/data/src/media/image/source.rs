//! Sources of image bytes: a file inside a root folder, or a data URI.

use std::ffi::OsStr;
use std::fs::File;
use std::io::{BufReader, ErrorKind};
use std::path::{Component, Path, PathBuf};

use base64::engine::{DecodePaddingMode, GeneralPurpose, GeneralPurposeConfig};
use base64::{Engine as _, alphabet};

use super::error::ImageError;

/// Padding is removed before decoding. Spare bits of the last character are ignored, as in other
/// decoders.
const BASE64: GeneralPurpose = GeneralPurpose::new(
    &alphabet::STANDARD,
    GeneralPurposeConfig::new()
        .with_decode_padding_mode(DecodePaddingMode::RequireNone)
        .with_decode_allow_trailing_bits(true),
);

/// Opens the file at `path` if it is inside `root`; see [`resolve`].
pub(super) fn open(root: &Path, path: &Path) -> Result<BufReader<File>, ImageError> {
    let real = resolve(root, path)?;
    let read_error = |source| ImageError::Read { path: path.to_owned(), source };
    let file = files::open(&real).map_err(read_error)?;
    let bytes = file.metadata().map_err(read_error)?.len();
    if bytes > MAX_FILE_BYTES {
        let problem = format!("the file has {bytes} bytes, and the limit is {MAX_FILE_BYTES}");
        return Err(read_error(std::io::Error::new(ErrorKind::FileTooLarge, problem)));
    }
    Ok(BufReader::new(file))
}

/// Maximum size of an image file, which is read as a whole: 512 MiB.
const MAX_FILE_BYTES: u64 = 512 << 20;

/// Resolves `path`, which is absolute or relative to `root`, to its canonical path.
///
/// Fails unless it is a regular file inside `root` after all symbolic links and `..` are resolved.
pub(crate) fn resolve(root: &Path, path: &Path) -> Result<PathBuf, ImageError> {
    let read_error = |source| ImageError::Read { path: path.to_owned(), source };
    let real_root =
        root.canonicalize().map_err(|source| ImageError::Root { root: root.to_owned(), source })?;
    // An error with `.` would not name the folder.
    let named = if root == Path::new(".") { &*real_root } else { root };
    let escapes = || ImageError::EscapesRoot { path: path.to_owned(), root: named.to_owned() };
    let real = match real_root.join(path).canonicalize() {
        Ok(real) => real,
        // `canonicalize` cannot resolve a missing file: choose the error from the path's text.
        Err(error) if error.kind() == ErrorKind::NotFound => {
            let written = normalise(&real_root.join(path));
            let inside = written.starts_with(&real_root)
                || path.is_absolute() && written.starts_with(normalise(root));
            return Err(if inside {
                ImageError::Missing { path: path.to_owned(), root: named.to_owned() }
            } else {
                escapes()
            });
        }
        Err(error) => return Err(read_error(error)),
    };
    if !real.starts_with(&real_root) {
        return Err(escapes());
    }
    // Checked before opening, because opening a pipe blocks until it has a writer.
    if !real.metadata().map_err(read_error)?.is_file() {
        let problem = "it is not a regular file";
        return Err(read_error(std::io::Error::new(ErrorKind::InvalidInput, problem)));
    }
    Ok(real)
}

/// Resolves `.` and `..` in the text of a path, without access to the file system.
fn normalise(path: &Path) -> PathBuf {
    let mut normal = PathBuf::new();
    for component in path.components() {
        match component {
            Component::CurDir => {}
            Component::ParentDir => {
                if normal.file_name().map_or("".as_ref(), |name| name) == OsStr::new("") {
                    normal.push("..");
                } else {
                    normal.pop();
                }
            }
            other => normal.push(other),
        }
    }
    normal
}

/// Decodes `data:[mime][;param]..;base64,..`. The MIME type is ignored. The base64 text may contain
/// whitespace, use the URL-safe alphabet and omit the padding.
pub(super) fn decode_data_uri(uri: &str) -> Result<Vec<u8>, ImageError> {
    let error = |problem: String| ImageError::DataUri { problem };
    let rest = match uri.trim_start().split_at_checked(5) {
        Some((scheme, rest)) if scheme.eq_ignore_ascii_case("data:") => rest,
        _ => return Err(error("it does not start with `data:`".into())),
    };
    let Some((header, text)) = rest.split_once(',') else {
        return Err(error("it has no `,` before the data".into()));
    };
    if !header.split(';').skip(1).any(|param| param.trim().eq_ignore_ascii_case("base64")) {
        return Err(error("it has no `;base64` before the `,`".into()));
    }
    let mut text: Vec<u8> = text
        .bytes()
        .filter(|byte| !byte.is_ascii_whitespace())
        .map(|byte| match byte {
            b'-' => b'+',
            b'_' => b'/',
            other => other,
        })
        .collect();
    let padding = text.iter().rev().take_while(|byte| **byte == b'=').count();
    text.truncate(text.len() - padding);
    BASE64.decode(&text).map_err(|source| {
        let source = source.to_string();
        error(format!("its base64 text is invalid: {}", source.trim_end_matches('.')))
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use fault::Fault;

    fn reason(error: Result<impl Sized, ImageError>) -> &'static str {
        error.err().map_or("none", |error| error.reason())
    }

    #[test]
    fn common_spellings_of_a_data_uri_are_decoded() {
        let bytes = [0xfb, 0xff, 0xfe, 1];
        for uri in [
            "data:image/png;base64,+//+AQ==",
            "data:image/png;base64,+//+AQ",
            "data:image/png;base64,-__-AQ==",
            "data:image/png;charset=utf-8;base64,+//+AQ==",
            "data:;base64,+//+AQ==",
            "DATA:image/PNG;BASE64,+//+AQ==",
            " data:image/png;base64,\r\n +//+\n AQ= =\n",
        ] {
            assert_eq!(decode_data_uri(uri).unwrap(), bytes, "{uri}");
        }
    }

    #[test]
    fn an_invalid_data_uri_is_an_error_that_names_the_defect() {
        for (uri, problem) in [
            ("data:image/png;base64", "no `,`"),
            ("data:image/png,abcd", "no `;base64`"),
            ("data:base64,abcd", "no `;base64`"),
            ("data", "start with `data:`"),
            ("\u{e9}\u{e9}\u{e9}", "start with `data:`"),
            ("data:;base64,abcde", "base64 text is invalid"),
            ("data:;base64,ab*d", "base64 text is invalid"),
            ("data:;base64,ab=d", "base64 text is invalid"),
        ] {
            let error = decode_data_uri(uri).unwrap_err();
            assert!(error.to_string().contains(problem), "{uri}: {error}");
            assert_eq!(error.reason(), "image_data_uri");
        }
    }

    #[test]
    fn only_files_inside_the_root_are_opened() {
        let folder = tempfile::tempdir().unwrap();
        let root = folder.path().join("root");
        std::fs::create_dir_all(root.join("sub")).unwrap();
        File::create(root.join("in.png")).unwrap();
        File::create(folder.path().join("out.png")).unwrap();
        let absolute = |path: &str| folder.path().join(path).display().to_string();
        for path in ["in.png", "./in.png", "sub/../in.png", "../root/in.png"] {
            assert_eq!(reason(open(&root, path.as_ref())), "none", "{path}");
        }
        assert_eq!(reason(open(&root, absolute("root/in.png").as_ref())), "none");
        for (path, expected) in [
            ("../out.png", "image_path_escapes_root"),
            ("sub/../../out.png", "image_path_escapes_root"),
            ("../no.png", "image_path_escapes_root"),
            ("../../../../../../../../../no.png", "image_path_escapes_root"),
            (&absolute("out.png"), "image_path_escapes_root"),
            (&absolute("no.png"), "image_path_escapes_root"),
            (&absolute("root/no.png"), "image_missing"),
            ("no.png", "image_missing"),
            ("sub", "image_unreadable"),
            ("nul\0.png", "image_unreadable"),
            ("in.png/more.png", "image_unreadable"),
        ] {
            assert_eq!(reason(open(&root, path.as_ref())), expected, "{path:?}");
        }
        assert_eq!(reason(open(&root.join("no"), "in.png".as_ref())), "image_root_missing");
    }

    #[test]
    fn a_file_that_no_image_needs_is_not_read() {
        let folder = tempfile::tempdir().unwrap();
        let file = File::create(folder.path().join("a.png")).unwrap();
        file.set_len(MAX_FILE_BYTES).unwrap();
        assert_eq!(reason(open(folder.path(), "a.png".as_ref())), "none");
        file.set_len(MAX_FILE_BYTES + 1).unwrap();
        let error = open(folder.path(), "a.png".as_ref()).unwrap_err();
        assert_eq!(error.reason(), "image_unreadable");
        let source = std::error::Error::source(&error).map(ToString::to_string);
        let text = format!("{error}: {source:?}");
        assert!(text.contains("536870913 bytes, and the limit is 536870912"), "{text}");
    }

    #[cfg(unix)]
    #[test]
    fn a_symbolic_link_may_point_inside_the_root_but_not_outside() {
        use std::os::unix::fs::symlink;
        let folder = tempfile::tempdir().unwrap();
        let root = folder.path().join("root");
        std::fs::create_dir_all(root.join("sub")).unwrap();
        File::create(root.join("in.png")).unwrap();
        File::create(folder.path().join("out.png")).unwrap();
        symlink("../in.png", root.join("sub/link.png")).unwrap();
        symlink("../out.png", root.join("out.png")).unwrap();
        symlink(folder.path(), root.join("up")).unwrap();
        symlink(&root, folder.path().join("alias")).unwrap();
        assert_eq!(reason(open(&root, "sub/link.png".as_ref())), "none");
        assert_eq!(reason(open(&root, "out.png".as_ref())), "image_path_escapes_root");
        assert_eq!(reason(open(&root, "up/out.png".as_ref())), "image_path_escapes_root");
        let alias = folder.path().join("alias");
        assert_eq!(reason(open(&alias, &alias.join("in.png"))), "none");
        assert_eq!(reason(open(&alias, &alias.join("no.png"))), "image_missing");
    }
}
