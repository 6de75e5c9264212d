//! Directories as published, as cut off by a download, and as made by someone who means harm.

use std::os::unix::fs::symlink;

use proptest::prelude::*;

use super::*;
use crate::weights::safetensors::tests::is_open;
use crate::weights::testing::{Tensor, edit, file, load};
use crate::weights::{SafetensorsError, SafetensorsFile, WeightsDigest};

const A: Tensor<'_> = ("a", "F32", &[2], b"abcdefgh");
const B: Tensor<'_> = ("b", "F16", &[1, 2], b"wxyz");
const C: Tensor<'_> = ("c", "BF16", &[1], b"01");
const INDEX: &str = "model.safetensors.index.json";

struct Model(tempfile::TempDir);

impl Model {
    fn empty() -> Self {
        Self(tempfile::tempdir().unwrap())
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    fn write(&self, name: &str, bytes: impl AsRef<[u8]>) {
        std::fs::write(self.path(name), bytes).unwrap();
    }

    fn index(&self, entries: &[(&str, &str)]) {
        let text: Vec<_> = entries
            .iter()
            .map(|(tensor, shard)| format!(r#""{tensor}":{}"#, serde_json::to_string(shard).unwrap()))
            .collect();
        self.write(
            INDEX,
            format!(r#"{{"metadata":{{"total_size":14}},"weight_map":{{{}}}}}"#, text.join(",")),
        );
    }

    /// `a` and `c` in shard 1, `b` in shard 2.
    fn sharded() -> Self {
        let model = Self::empty();
        model.write("1.safetensors", file(&[A, C]));
        model.write("2.safetensors", file(&[B]));
        model.index(&[("b", "2.safetensors"), ("a", "1.safetensors"), ("c", "1.safetensors")]);
        model
    }

    fn source(&self) -> Checkpoint {
        Checkpoint::at(self.0.path())
    }

    fn fault(&self) -> SourceError {
        let fault = self.source().index().unwrap_err();
        assert!(!is_open(self.0.path()));
        fault
    }
}

#[test]
fn c29_shards_and_a_single_file_have_one_digest() {
    let single = Model::empty();
    single.write("model.safetensors", file(&[C, B, A]));
    let expected = WeightsDigest::of(&mut single.source()).unwrap();
    assert_eq!(
        WeightsDigest::of(&mut SafetensorsFile::at(single.path("model.safetensors"))).unwrap(),
        expected
    );
    let sharded = Model::sharded();
    let mut source = sharded.source();
    assert_eq!(WeightsDigest::of(&mut source).unwrap(), expected);
    assert!(!is_open(sharded.0.path()));
    // Any order of reading, switching between the files.
    let specs = source.index().unwrap();
    for tensor in [2, 0, 2, 1, 0] {
        let mut bytes = Vec::new();
        source.read(tensor, &mut |piece| bytes.extend_from_slice(piece)).unwrap();
        let original = [A, B, C].into_iter().find(|original| original.0 == specs[tensor].name).unwrap();
        assert_eq!(bytes, original.3);
        let open = std::fs::read_dir("/proc/self/fd").unwrap().flatten();
        let ours = open.filter_map(|fd| std::fs::read_link(fd.path()).ok());
        assert_eq!(ours.filter(|target| target.starts_with(sharded.0.path())).count(), 1);
    }
    assert!(is_open(sharded.0.path()));
    drop(source);
    assert!(!is_open(sharded.0.path()));
    // Where both layouts are there, the single file is the model.
    sharded.write("model.safetensors", file(&[A]));
    assert_eq!(load(&mut sharded.source()).unwrap().len(), 1);
    assert!(matches!(Model::empty().fault(), SourceError::NoCheckpoint { .. }));
}

#[test]
fn index_and_shards_must_agree() {
    let model = Model::sharded();
    model.index(&[("a", "1.safetensors"), ("b", "2.safetensors")]);
    let fault = model.fault().to_string();
    assert!(fault.contains("`c`") && fault.contains("1.safetensors"), "{fault}");
    model.index(&[("a", "1.safetensors"), ("b", "2.safetensors"), ("c", "2.safetensors")]);
    assert!(matches!(model.fault(), SourceError::NotInIndex { listed_in: Some(_), .. }));
    model.index(&[
        ("a", "1.safetensors"),
        ("c", "1.safetensors"),
        ("b", "2.safetensors"),
        ("d", "2.safetensors"),
    ]);
    let fault = model.fault();
    assert!(matches!(&fault, SourceError::NotInShard { tensor, .. } if tensor == "d"), "{fault}");
    assert!(fault.to_string().contains("2.safetensors"));
    model.index(&[("a", "1.safetensors"), ("c", "1.safetensors"), ("b", "3.safetensors")]);
    let fault = model.fault();
    assert!(
        matches!(fault, SourceError::Io { .. }) && fault.to_string().contains("3.safetensors"),
        "{fault}"
    );
}

#[test]
fn b42_a_tensor_in_two_shards_or_twice_in_the_index_is_an_error() {
    let model = Model::sharded();
    model.write("2.safetensors", file(&[B, A]));
    assert!(matches!(model.fault(), SourceError::NotInIndex { tensor, .. } if tensor == "a"));
    model.write("2.safetensors", file(&[B]));
    model.index(&[
        ("a", "1.safetensors"),
        ("a", "1.safetensors"),
        ("b", "2.safetensors"),
        ("c", "1.safetensors"),
    ]);
    let fault = model.fault().to_string();
    assert!(fault.contains("`a` occurs twice") && fault.contains(INDEX), "{fault}");
}

#[test]
fn b36_names_that_leave_the_directory_are_never_opened() {
    let outside = Model::empty();
    // Valid, so that it would load; its access time, older than its content, would tell that it was read.
    outside.write("canary.safetensors", file(&[A]));
    let canary = outside.path("canary.safetensors");
    let never = std::fs::FileTimes::new().set_accessed(std::time::UNIX_EPOCH);
    std::fs::File::options().write(true).open(&canary).unwrap().set_times(never).unwrap();
    let model = Model::empty();
    std::fs::create_dir(model.path("sub")).unwrap();
    model.write("sub/inner.safetensors", file(&[A]));
    let relative = format!("../{}/canary.safetensors", outside.0.path().file_name().unwrap().display());
    let long = "n".repeat(5000);
    for name in [
        relative.as_str(),
        canary.to_str().unwrap(),
        "a/../../x",
        "sub/inner.safetensors",
        "sub\\inner.safetensors",
        "./1.safetensors",
        "..",
        ".",
        "",
        "x\0.safetensors",
        "x\n.safetensors",
        &long,
    ] {
        model.index(&[("a", name)]);
        let fault = model.fault();
        assert!(
            matches!(&fault, SourceError::ShardName { tensor, .. } if tensor == "a"),
            "{name:?}: {fault}"
        );
        assert!(fault.to_string().len() < 1000);
    }
    model.write(INDEX, r#"{"weight_map":{"a":5}}"#);
    assert!(matches!(model.fault(), SourceError::ShardName { .. }));

    symlink(&canary, model.path("link.safetensors")).unwrap();
    symlink("link.safetensors", model.path("chain.safetensors")).unwrap();
    for name in ["link.safetensors", "chain.safetensors"] {
        model.index(&[("a", name)]);
        let fault = model.fault();
        assert!(
            matches!(&fault, SourceError::LinkLeavesDirectory { target, .. } if target.ends_with("canary.safetensors"))
        );
    }
    symlink("sub/inner.safetensors", model.path("down.safetensors")).unwrap();
    model.index(&[("a", "down.safetensors")]);
    assert!(matches!(model.fault(), SourceError::LinkLeavesDirectory { .. }));
    std::fs::remove_file(model.path(INDEX)).unwrap();
    symlink(&canary, model.path("model.safetensors")).unwrap();
    assert!(matches!(model.fault(), SourceError::LinkLeavesDirectory { .. }));
    std::fs::remove_file(model.path("model.safetensors")).unwrap();
    symlink(&canary, model.path(INDEX)).unwrap();
    assert!(matches!(model.fault(), SourceError::LinkLeavesDirectory { .. }));
    assert_eq!(std::fs::metadata(&canary).unwrap().accessed().unwrap(), std::time::UNIX_EPOCH);
}

#[test]
fn links_inside_the_directory_and_to_blobs_of_the_cache_are_followed() {
    let model = Model::empty();
    model.write("real.safetensors", file(&[A]));
    symlink("real.safetensors", model.path("link.safetensors")).unwrap();
    model.index(&[("a", "link.safetensors")]);
    assert_eq!(load(&mut model.source()).unwrap().len(), 1);

    let cache = Model::empty();
    for directory in ["blobs", "snapshots", "snapshots/abc", "other"] {
        std::fs::create_dir(cache.path(directory)).unwrap();
    }
    cache.write("blobs/0123", file(&[A]));
    cache.write("other/0123", file(&[A]));
    symlink("../../blobs/0123", cache.path("snapshots/abc/model.safetensors")).unwrap();
    let mut source = Checkpoint::at(cache.path("snapshots/abc"));
    assert_eq!(load(&mut source).unwrap().len(), 1);
    std::fs::remove_file(cache.path("snapshots/abc/model.safetensors")).unwrap();
    symlink("../../other/0123", cache.path("snapshots/abc/model.safetensors")).unwrap();
    assert!(matches!(source.index(), Err(SourceError::LinkLeavesDirectory { .. })));
}

#[test]
fn b40_a_truncated_second_shard_is_found_before_anything_is_read() {
    let model = Model::sharded();
    let whole = file(&[B]);
    let header = u64::from_le_bytes(whole[..8].try_into().unwrap()) as usize;
    for length in [0, 4, 8, 8 + header - 1, 8 + header, whole.len() - 2, whole.len() - 1] {
        model.write("2.safetensors", &whole[..length]);
        let fault = model.fault().to_string();
        assert!(fault.contains("2.safetensors") && fault.contains("truncated"), "{length}: {fault}");
    }
    model.write("2.safetensors", &whole);
    assert!(load(&mut model.source()).is_ok());
}

#[test]
fn c27_a_shard_that_changes_during_the_load_is_an_error() {
    let model = Model::sharded();
    let mut source = model.source();
    let specs = source.index().unwrap();
    std::thread::sleep(std::time::Duration::from_millis(30));
    model.write("2.safetensors", file(&[("b", "F16", &[1, 2], b"WXYZ")]));
    let place = specs.iter().position(|spec| spec.name == "b").unwrap();
    let result = source.read(place, &mut |_| panic!("nothing of the new file is handed over"));
    assert!(
        matches!(result, Err(SourceError::ChangedDuringRead { path }) if path.ends_with("2.safetensors"))
    );
    assert!(matches!(source.finish(), Err(SourceError::ChangedDuringRead { .. })));
    assert!(!is_open(model.0.path()));
    // The next load simply reads what is there now.
    let tensors = load(&mut source).unwrap();
    assert!(tensors.iter().any(|(_, bytes)| bytes == b"WXYZ"));
    std::fs::remove_file(model.path("1.safetensors")).unwrap();
    assert!(source.index().is_err());
    assert!(matches!(source.read(0, &mut |_| ()), Err(SourceError::NoSuchTensor { count: 0, .. })));
}

#[test]
fn malformed_indices_are_errors_that_name_the_file() {
    let model = Model::sharded();
    for text in [
        "",
        "[]",
        "{}",
        r#"{"weight_map":[]}"#,
        r#"{"weight_map":{}} x"#,
        r#"{"weight_map":{},"weight_map":{}}"#,
        &format!(r#"{{"weight_map":{{"a":{}"#, "[".repeat(1_000_000)),
        &format!(r#"{{"metadata":{}"#, "[".repeat(1_000_000)),
    ] {
        model.write(INDEX, text);
        let fault = model.fault().to_string();
        assert!(fault.contains(INDEX), "{fault}");
    }
    std::fs::File::create(model.path(INDEX)).unwrap().set_len(MAX_INDEX_BYTES + 1).unwrap();
    assert!(matches!(model.fault(), SourceError::IndexTooLarge { .. }));
    let names: Vec<String> = (0..=MAX_SHARDS).map(|i| format!("{i}.safetensors")).collect();
    let entries: Vec<_> = names.iter().map(|name| (name.as_str(), name.as_str())).collect();
    model.index(&entries);
    assert!(matches!(model.fault(), SourceError::TooMany { what: "shards", .. }));
}

#[test]
fn tensors_of_other_dtypes_are_set_aside() {
    let model = Model::sharded();
    model.write("2.safetensors", file(&[("ids", "I64", &[1], b"12345678"), B]));
    model.index(&[
        ("a", "1.safetensors"),
        ("b", "2.safetensors"),
        ("c", "1.safetensors"),
        ("ids", "2.safetensors"),
    ]);
    let mut source = model.source();
    assert_eq!(load(&mut source).unwrap().len(), 3);
    assert_eq!(source.unsupported().len(), 1);
    model.write("2.safetensors", &file(&[B])[..20]);
    let fault = model.fault();
    assert!(matches!(fault, SourceError::Safetensors { fault, .. }
            if matches!(*fault, SafetensorsError::TruncatedHeader { .. })));
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(256))]

    #[test]
    fn edited_indices_never_panic(edits in prop::collection::vec(any::<(u8, usize, u8)>(), 1..4)) {
        let model = Model::sharded();
        let mut text = std::fs::read(model.path(INDEX)).unwrap();
        edits.into_iter().for_each(|change| edit(&mut text, change));
        model.write(INDEX, &text);
        if let Ok(tensors) = load(&mut model.source()) {
            // Only edits of what isn't used can leave the index valid.
            prop_assert_eq!(tensors.len(), 3);
        }
    }
}
