use super::*;
use std::fs;

/// A folder of the test, with the files `80/a.ptx` and `80/b.ptx`.
struct Folder(PathBuf);

impl Folder {
    #[expect(clippy::disallowed_methods, reason = "a folder of its own")]
    fn new(name: &str) -> Self {
        let root = std::env::temp_dir().join(format!("ptx-{name}-{}", std::process::id()));
        fs::create_dir_all(root.join("80")).expect("the folder is created");
        let kernel = |name: &str, code: &str| {
            format!(
                ".visible .entry {name}(.param .u64 x) {{ .reg .b32 %r<4>; .reg .b64 %d<2>;\n{code}\nret; }}\n"
            )
        };
        let right = kernel("first", "")
            + &kernel("second", "ld.param.u64 %d1, [x]; st.global.u64 [%d1], %d1;");
        fs::write(root.join("80/a.ptx"), right).expect("the file is written");
        fs::write(root.join("80/b.ptx"), kernel("wrong", "unknown;")).expect("the file is written");
        Self(root)
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

/// Memory without an allocation.
#[derive(Debug)]
struct Nothing;

impl Host for Nothing {
    fn find(&self, _: u64) -> Option<(u64, usize)> {
        None
    }

    fn unwritten(&self, _: u64, _: usize) -> Option<u64> {
        None
    }

    fn write(&self, _: u64, _: usize) {}
}

/// The failure of a launch of `second` in a thread of this name.
#[expect(unsafe_code, reason = "a kernel takes addresses")]
fn fail(library: &Library, thread: &str) -> Failure {
    let launch = || {
        let kernel = library.kernel("second").expect("the kernel exists");
        let mut argument = 256_u64;
        let arguments = [std::ptr::from_mut(&mut argument).cast::<c_void>()];
        // SAFETY: the argument is an address of 8 bytes; no allocation exists.
        unsafe { library.launch(kernel, [1; 3], 32, 0, arguments.as_ptr(), &Nothing) }
    };
    std::thread::scope(|scope| {
        let builder = std::thread::Builder::new().name(thread.to_owned());
        let launched = builder.spawn_scoped(scope, launch).expect("a thread starts");
        *launched.join().expect("it does not panic").expect_err("the address is in no allocation")
    })
}

#[test]
fn files_are_parsed_when_a_kernel_is_launched() {
    let folder = Folder::new("parse");
    let library = Library::open(&folder.0, "8.0", None).expect("the folder is read");
    assert_eq!(library.kernel("first").expect("the kernel exists").name, "first");
    let error = library.kernel("third").expect_err("no kernel has the name");
    assert_eq!(error.to_string(), "no kernel has the name `third`");
    let error = library.kernel("wrong").expect_err("the code is wrong");
    assert!(matches!(error, LibraryError::Parse { .. }), "{error}");
}

#[test]
fn a_failure_names_a_seed_that_depends_on_the_thread_only() {
    let folder = Folder::new("seed");
    let library = Library::open(&folder.0, "8.0", None).expect("the folder is read");
    let first = fail(&library, "a");
    let text = first.to_string();
    assert!(text.contains(&format!("thread 0, seed {}", first.seed)), "{text}");
    let other = fail(&library, "b");
    assert_ne!(first.seed, other.seed);
    let again = Library::open(&folder.0, "8.0", None).expect("the folder is read");
    assert_eq!(fail(&again, "a").seed, first.seed);
    let mixed = Library { seed: "7".to_owned(), ..again };
    assert_ne!(fail(&mixed, "a").seed, first.seed);
}

#[test]
fn blocks_have_the_limits_of_their_capability() {
    let folder = Folder::new("limits");
    let library = Library::open(&folder.0, "8.0", None).expect("the folder is read");
    assert_eq!(library.max_shared_bytes, 166_912);
    let kernel = library.kernel("first").expect("the kernel exists");
    let mut argument = 256_u64;
    let arguments = [std::ptr::from_mut(&mut argument).cast::<c_void>()];
    #[expect(unsafe_code, reason = "a kernel takes addresses")]
    // SAFETY: the argument is an address of 8 bytes; no allocation exists.
    let launch = |threads, shared| unsafe {
        library.launch(kernel, [1; 3], threads, shared, arguments.as_ptr(), &Nothing)
    };
    launch(32, 166_912).expect("all shared memory");
    launch(32, 166_913).expect_err("too much shared memory");
    launch(0, 0).expect_err("no threads");
}
