//! The bytes of an image: a file inside its root folder, or a data URI.

use std::ffi::OsStr;
use std::fs::File;
use std::io::{BufReader, ErrorKind};
use std::path::{Component, Path, PathBuf};

use base64::Engine as _;
use base64::alphabet;
use base64::engine::{DecodePaddingMode, GeneralPurpose, GeneralPurposeConfig};

use super::ImageError;

/// Padding is stripped before decoding; spare bits of the last character are ignored as other
/// decoders do.
const BASE64: GeneralPurpose = GeneralPurpose::new(
    &alphabet::STANDARD,
    GeneralPurposeConfig::new()
        .with_decode_padding_mode(DecodePaddingMode::RequireNone)
        .with_decode_allow_trailing_bits(true),
);

/// Opens what [`resolve`] finds.
pub(super) fn open(root: &Path, path: &Path) -> Result<BufReader<File>, ImageError> {
    let real = resolve(root, path)?;
    let file = File::open(&real);
    file.map(BufReader::new).map_err(|source| ImageError::Read { path: path.to_owned(), source })
}

/// The real place of `path`, relative to `root` or absolute, if it is a file inside `root` after
/// every link and `..` is resolved.
pub(in crate::data) fn resolve(root: &Path, path: &Path) -> Result<PathBuf, ImageError> {
    let read_error = |source| ImageError::Read { path: path.to_owned(), source };
    let escapes = || ImageError::EscapesRoot { path: path.to_owned(), root: root.to_owned() };
    let real_root =
        root.canonicalize().map_err(|source| ImageError::Root { root: root.to_owned(), source })?;
    let real = match real_root.join(path).canonicalize() {
        Ok(real) => real,
        // Nothing to resolve: say what is wrong from the path as it is written.
        Err(error) if error.kind() == ErrorKind::NotFound => {
            let written = normalise(&real_root.join(path));
            let inside = written.starts_with(&real_root)
                || path.is_absolute() && written.starts_with(normalise(root));
            return Err(if inside {
                ImageError::Missing { path: path.to_owned(), root: root.to_owned() }
            } else {
                escapes()
            });
        }
        Err(error) => return Err(read_error(error)),
    };
    if !real.starts_with(&real_root) {
        return Err(escapes());
    }
    // Asked before opening: opening a pipe would wait for its writer.
    if !real.metadata().map_err(read_error)?.is_file() {
        return Err(read_error(std::io::Error::new(ErrorKind::InvalidInput, "it is not a file")));
    }
    Ok(real)
}

/// Resolves `.` and `..` without the file system.
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

/// Decodes `data:[mime][;param]..;base64,..`. The mime type is not looked at. The base64 text may
/// be broken into lines, URL-safe, and without padding.
pub(super) fn decode_data_uri(uri: &str) -> Result<Vec<u8>, ImageError> {
    let error = |problem: String| ImageError::DataUri { problem };
    let rest = match uri.trim_start().split_at_checked(5) {
        Some((scheme, rest)) if scheme.eq_ignore_ascii_case("data:") => rest,
        _ => return Err(error("it does not start with `data:`".into())),
    };
    let Some((header, text)) = rest.split_once(',') else {
        return Err(error("there is no `,` before the data".into()));
    };
    if !header.split(';').skip(1).any(|param| param.trim().eq_ignore_ascii_case("base64")) {
        return Err(error("it is not `;base64`".into()));
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
        error(format!("its base64 is broken: {}", source.trim_end_matches('.')))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn reason(error: Result<impl Sized, ImageError>) -> &'static str {
        error.err().map_or("none", |error| error.reason())
    }

    #[test]
    fn a_data_uri_may_be_written_in_every_usual_way() {
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
    fn a_broken_data_uri_says_what_is_wrong() {
        for (uri, problem) in [
            ("data:image/png;base64", "no `,`"),
            ("data:image/png,abcd", "not `;base64`"),
            ("data:base64,abcd", "not `;base64`"),
            ("data", "start with `data:`"),
            ("\u{e9}\u{e9}\u{e9}", "start with `data:`"),
            ("data:;base64,abcde", "base64 is broken"),
            ("data:;base64,ab*d", "base64 is broken"),
            ("data:;base64,ab=d", "base64 is broken"),
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

    #[cfg(unix)]
    #[test]
    fn a_link_may_lead_around_inside_the_root_but_not_out_of_it() {
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
