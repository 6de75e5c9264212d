//! The rules of the code base that the compiler does not know.

use std::fs;
use std::path::{Path, PathBuf};

fn sources(directory: &str) -> Vec<PathBuf> {
    let mut found = Vec::new();
    let mut open = vec![Path::new(env!("CARGO_MANIFEST_DIR")).join(directory)];
    while let Some(directory) = open.pop() {
        for entry in fs::read_dir(directory).expect("a folder of the repository") {
            let path = entry.expect("a readable entry").path();
            match path.extension() {
                _ if path.is_dir() => open.push(path),
                Some(extension) if extension == "rs" => found.push(path),
                _ => {}
            }
        }
    }
    assert!(!found.is_empty(), "{directory} has sources");
    found
}

/// Fails with all lines of `directory` for which `fault` says something.
fn check(directory: &str, fault: impl Fn(&Path, &str) -> Option<String>) {
    let mut faults = Vec::new();
    for path in sources(directory) {
        let text = fs::read_to_string(&path).expect("a text file");
        for (number, line) in text.lines().enumerate() {
            if let Some(fault) = fault(&path, line) {
                faults.push(format!("{}:{}: {fault}", path.display(), number + 1));
            }
        }
    }
    assert!(faults.is_empty(), "{}", faults.join("\n"));
}

#[test]
fn lines_fit_and_nothing_is_left_to_do() {
    for directory in ["src", "tests", "examples", "benches"] {
        check(directory, |path, line| {
            let long = line.chars().count() > 120 && !path.ends_with("tests/tidy.rs");
            let marker = ["TODO", "FIXME", "XXX"].iter().find(|marker| line.contains(**marker));
            match marker {
                Some(marker) if !path.ends_with("tests/tidy.rs") => Some(format!("{marker} is left")),
                _ => long.then(|| "the line is over 120 characters".to_owned()),
            }
        });
    }
}

#[test]
fn modules_stay_readable() {
    for path in sources("src") {
        let lines = fs::read_to_string(&path).expect("a text file").lines().count();
        let tests = path.iter().any(|part| part.to_string_lossy().starts_with("tests"));
        assert!(tests || lines <= 600, "{} has {lines} lines", path.display());
    }
}

#[test]
fn unsafe_code_is_in_the_device_only() {
    check("src", |path, line| {
        let device = path.components().any(|part| part.as_os_str() == "device");
        let code = line.split("//").next().unwrap_or_default();
        (!device && code.contains("unsafe ")).then(|| "unsafe outside src/device".to_owned())
    });
}

/// The pure parts name no device; the device names none of them; the model names no scheduler. Tests name what they
/// like.
#[test]
fn dependencies_point_downwards() {
    let forbidden: [(&str, &[&str]); 8] = [
        ("engine", &["crate::control"]),
        ("weights", &["crate::control", "crate::engine::"]),
        ("request", &["crate::control"]),
        ("kv", &["crate::device", "crate::model", "crate::engine", "crate::scheduler"]),
        ("scheduler", &["crate::device", "crate::model", "crate::engine", "crate::sampling"]),
        ("model", &["crate::scheduler", "crate::engine", "crate::kv", "crate::sampling"]),
        ("device", &["crate::scheduler", "crate::engine", "crate::kv", "crate::model", "crate::sampling"]),
        ("sampling", &["crate::scheduler", "crate::engine", "crate::kv", "crate::model"]),
    ];
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    for (module, names) in forbidden {
        check("src", |path, line| {
            let path = path.strip_prefix(&root).expect("a path below src").with_extension("");
            let tests = path.iter().any(|part| part == "tests");
            let inside = !tests && path.iter().next().is_some_and(|part| part == module);
            let named = names.iter().find(|name| line.contains(**name));
            named.filter(|_| inside).map(|name| format!("{module} names {name}"))
        });
    }
}
