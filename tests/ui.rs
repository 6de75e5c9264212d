//! The lifecycle is the type: each misuse fails to compile with a message that names it, and its twin, one
//! step away, compiles.

/// The messages are those of this compiler; others word them differently.
const TOOLCHAIN: &str = "1.95";

#[test]
fn c05_c06_misuse_of_the_lifecycle_does_not_compile() {
    let rustc = std::env::var("RUSTC").unwrap_or_else(|_| "rustc".into());
    let version = std::process::Command::new(rustc).arg("--version").output().expect("rustc runs");
    let version = String::from_utf8_lossy(&version.stdout).into_owned();
    let cases = trybuild::TestCases::new();
    cases.pass("tests/ui/pass/*.rs");
    if version.contains(TOOLCHAIN) {
        cases.compile_fail("tests/ui/*.rs");
    } else {
        eprintln!("SKIPPED: compile-fail messages are kept for rustc {TOOLCHAIN}, this is {version}");
    }
}
