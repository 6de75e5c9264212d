//! Well-formed files, every kind of malformed one, and files that change under the reader.

use std::path::{Path, PathBuf};
use std::time::Duration;

use proptest::prelude::*;

use super::header::{ElementType, MAX_HEADER_BYTES, MAX_TENSORS};
use super::*;
use crate::weights::WeightsDigest;
use crate::weights::testing::{Tensor, edit, file, header, load, padded_file, raw};

const SAMPLE: [Tensor<'_>; 4] = [
    ("a", "F32", &[2, 1], b"abcdefgh"),
    ("b.bias", "BF16", &[3], b"uvwxyz"),
    ("empty", "F16", &[0, 7], b""),
    ("scalar", "F16", &[], b"01"),
];

fn fault_of(bytes: &[u8]) -> SafetensorsError {
    match load(&mut SafetensorsBytes::new(bytes)) {
        Err(SourceError::SafetensorsBuffer { fault }) => *fault,
        other => panic!("{other:?} for {}", String::from_utf8_lossy(bytes)),
    }
}

fn entry(name: &str, dtype: &str, shape: &str, begin: u64, end: u64) -> String {
    format!(r#""{name}":{{"dtype":"{dtype}","shape":{shape},"data_offsets":[{begin},{end}]}}"#)
}

fn fault_of_entries(entries: &[String], data: usize) -> SafetensorsError {
    fault_of(&raw(&format!("{{{}}}", entries.join(",")), &vec![0; data]))
}

/// A directory and a file in it.
fn on_disk(bytes: &[u8]) -> (tempfile::TempDir, PathBuf) {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("model.safetensors");
    std::fs::write(&path, bytes).unwrap();
    (directory, path)
}

/// Time stamps of a file system have a coarse clock.
fn wait_a_tick() {
    std::thread::sleep(Duration::from_millis(30));
}

pub(in crate::weights) fn is_open(path: &Path) -> bool {
    let descriptors = std::fs::read_dir("/proc/self/fd").unwrap();
    descriptors.flatten().any(|fd| std::fs::read_link(fd.path()).is_ok_and(|target| target.starts_with(path)))
}

#[test]
fn reads_what_was_written() {
    let (_directory, path) = on_disk(&file(&SAMPLE));
    for tensors in [
        load(&mut SafetensorsFile::at(&path)).unwrap(),
        load(&mut SafetensorsBytes::new(file(&SAMPLE))).unwrap(),
    ] {
        assert_eq!(tensors.len(), 4);
        for (name, _, shape, data) in SAMPLE {
            let (spec, bytes) = tensors.iter().find(|(spec, _)| spec.name == name).unwrap();
            assert_eq!((&spec.shape[..], &bytes[..]), (shape, data));
        }
        assert_eq!(tensors[0].0.dtype, DType::F32);
    }
    assert!(load(&mut SafetensorsBytes::new(raw("{}", b""))).unwrap().is_empty());
    let metadata = format!(r#"{{"__metadata__":{{"format":"pt","x\n":"\u00e9"}},{}"#, &header(&SAMPLE)[1..]);
    assert_eq!(load(&mut SafetensorsBytes::new(raw(&metadata, b"abcdefghuvwxyz01"))).unwrap().len(), 4);
}

#[test]
fn reads_a_tensor_larger_than_the_buffer_in_order() {
    let data: Vec<u8> = (0..CHUNK_BYTES as u32 + 2000).map(|i| (i / 7) as u8).collect();
    let bytes = file(&[("big", "F32", &[data.len() / 4], &data), ("c", "F16", &[1], b"zz")]);
    let (_directory, path) = on_disk(&bytes);
    let tensors = load(&mut SafetensorsFile::at(&path)).unwrap();
    assert!(tensors[0].1 == data && tensors[1].1 == b"zz");
    assert_eq!(
        WeightsDigest::of(&mut SafetensorsFile::at(&path)).unwrap(),
        WeightsDigest::of(&mut SafetensorsBytes::new(bytes)).unwrap()
    );
}

#[test]
fn threads_read_any_part_of_a_tensor_and_nothing_beyond_it() {
    let bytes = file(&[("a", "F16", &[4], b"abcdefgh"), ("b", "F32", &[2], b"ijklmnop")]);
    let (_directory, path) = on_disk(&bytes);
    let mut source = SafetensorsFile::at(&path);
    assert!(matches!(source.reader(0), Err(SourceError::NoSuchTensor { tensor: 0, count: 0 })));
    source.index().unwrap();
    let reader = source.reader(1).unwrap().unwrap();
    std::thread::scope(|scope| {
        for (offset, expected) in [(0, &b"ijklmnop"[..]), (3, b"lmn"), (7, b"p"), (8, b"")] {
            let reader = &*reader;
            scope.spawn(move || {
                let mut out = vec![0; expected.len()];
                reader.read_at(offset, &mut out).unwrap();
                assert_eq!(out, expected);
            });
        }
    });
    for (offset, len) in [(8, 1), (0, 9), (usize::MAX, 1), (9, 0)] {
        let fault = reader.read_at(offset, &mut vec![0; len]).unwrap_err();
        assert!(matches!(fault, SourceError::Io { .. }), "{fault}");
    }
}

#[test]
fn b41_unaligned_data_give_the_same_digest() {
    let aligned = WeightsDigest::of(&mut SafetensorsBytes::new(file(&SAMPLE))).unwrap();
    for padding in 1..8 {
        let bytes = padded_file(&SAMPLE, padding);
        let (_directory, path) = on_disk(&bytes);
        assert_eq!(WeightsDigest::of(&mut SafetensorsFile::at(&path)).unwrap(), aligned);
        // The whole buffer at an odd address too.
        let shifted = [vec![0; padding], bytes].concat();
        assert_eq!(WeightsDigest::of(&mut SafetensorsBytes::new(&shifted[padding..])).unwrap(), aligned);
    }
}

#[test]
fn b38_header_length_is_checked_before_anything_else() {
    let with_length = |length: u64, rest: &[u8]| [&length.to_le_bytes(), rest].concat();
    for length in [u64::MAX, u64::MAX - 7, 1 << 63, 2 << 30, MAX_HEADER_BYTES + 1] {
        let fault = fault_of(&with_length(length, b"{}"));
        assert_eq!(fault, SafetensorsError::HeaderTooLong { bytes: length, limit_bytes: MAX_HEADER_BYTES });
    }
    let truncated = SafetensorsError::TruncatedHeader { expected_bytes: 11, actual_bytes: 10 };
    assert_eq!(fault_of(&with_length(3, b"{}")), truncated);
    assert_eq!(fault_of(&with_length(0, b"")), SafetensorsError::NotAnObject);
    assert!(matches!(fault_of(&with_length(1, b"{")), SafetensorsError::Json { .. }));
    // Two GiB that are really there (a sparse file).
    let (_directory, path) = on_disk(&(2_u64 << 30).to_le_bytes());
    std::fs::File::options().write(true).open(&path).unwrap().set_len((2 << 30) + 8).unwrap();
    let fault = SafetensorsFile::at(&path).index().unwrap_err().to_string();
    assert!(fault.contains("2147483648") && fault.contains("model.safetensors"), "{fault}");
}

#[test]
fn b38_overlaps_holes_and_trailing_bytes_are_distinct_errors() {
    let f32s = |name: &str, begin: u64, end: u64| {
        entry(name, "F32", &format!("[{}]", (end - begin) / 4), begin, end)
    };
    assert_eq!(
        fault_of_entries(&[f32s("a", 0, 8), f32s("b", 4, 12)], 12),
        SafetensorsError::Overlap { tensor: "b".into(), begin: 4, other: "a".into(), other_end: 8 }
    );
    assert!(matches!(
        fault_of_entries(&[f32s("a", 0, 8), f32s("b", 0, 8)], 8),
        SafetensorsError::Overlap { .. }
    ));
    assert!(matches!(
        fault_of_entries(&[f32s("a", 0, 8), f32s("b", 4, 4)], 8),
        SafetensorsError::Overlap { .. }
    ));
    assert_eq!(
        fault_of_entries(&[f32s("b", 8, 12), f32s("a", 0, 4)], 12),
        SafetensorsError::Hole { tensor: "b".into(), begin: 4, end: 8 }
    );
    assert_eq!(
        fault_of_entries(&[f32s("a", 4, 8)], 8),
        SafetensorsError::Hole { tensor: "a".into(), begin: 0, end: 4 }
    );
    let trailing = fault_of_entries(&[f32s("a", 0, 8)], 11);
    assert!(matches!(trailing, SafetensorsError::TrailingBytes { .. }));
    assert!(trailing.to_string().starts_with("3 bytes"), "{trailing}");
}

#[test]
fn b37_ranges_are_checked_whatever_the_dtype() {
    const MAX: u64 = u64::MAX;
    for dtype in ["F32", "XYZ", "f32", "", "I64"] {
        let inverted = fault_of_entries(&[entry("t", dtype, "[1]", 4, 0)], 4);
        assert_eq!(inverted, SafetensorsError::Inverted { tensor: "t".into(), begin: 4, end: 0 });
        for (begin, end) in [(0, 8), (0, MAX), (MAX, MAX), (MAX - 3, MAX)] {
            let fault = fault_of_entries(&[entry("t", dtype, "[2]", begin, end)], 4);
            assert!(fault.to_string().contains("`t`"), "{dtype} {begin} {end}: {fault}");
        }
    }
    assert!(matches!(
        fault_of_entries(&[entry("t", "XYZ", "[2]", 0, 8)], 4),
        SafetensorsError::TruncatedData { actual_bytes, .. } if actual_bytes > 4
    ));
    for shape in ["[18446744073709551615, 2]", "[4294967296, 4294967296]", "[4611686018427387904]"] {
        let fault = fault_of_entries(&[entry("t", "F32", shape, 0, 4)], 4);
        assert!(matches!(fault, SafetensorsError::SizeOverflow { .. }), "{fault}");
    }
    for (dtype, shape) in [("F32", "[2]"), ("F16", "[1]"), ("F4", "[1]"), ("I64", "[1]"), ("F32", "[0]")] {
        let fault = fault_of_entries(&[entry("t", dtype, shape, 0, 4)], 4);
        assert!(matches!(fault, SafetensorsError::WrongSize { .. }), "{dtype} {shape}: {fault}");
    }
}

#[test]
fn b37_tensors_of_other_dtypes_are_set_aside() {
    let bytes = file(&[
        ("a", "F32", &[1], b"1234"),
        ("position_ids", "I64", &[1], b"12345678"),
        ("fp8", "F8_E4M3", &[3], b"abc"),
        ("odd", "XYZ", &[99], b"?"),
    ]);
    let mut source = SafetensorsBytes::new(bytes);
    let specs = source.index().unwrap();
    assert_eq!(specs.len(), 1);
    let other: Vec<_> = source.unsupported().iter().map(|t| (t.name.as_str(), t.dtype.as_str())).collect();
    assert_eq!(other, [("position_ids", "I64"), ("fp8", "F8_E4M3"), ("odd", "XYZ")]);
    assert!(matches!(source.read(1, &mut |_| ()), Err(SourceError::NoSuchTensor { tensor: 1, count: 1 })));
    assert_eq!(ElementType::Unknown("x".into()).supported(), None);
}

#[test]
fn b42_duplicate_names_are_an_error_that_names_the_key() {
    for (begin, end) in [(0, 4), (4, 8)] {
        let fault = fault_of_entries(
            &[entry("twice", "F32", "[1]", 0, 4), entry("twice", "F32", "[1]", begin, end)],
            8,
        );
        assert_eq!(fault, SafetensorsError::Duplicate { tensor: "twice".into() });
    }
    // The same name in another spelling.
    let fault = fault_of_entries(&[entry("t", "F32", "[1]", 0, 4), entry("\\u0074", "F32", "[1]", 4, 8)], 8);
    assert_eq!(fault, SafetensorsError::Duplicate { tensor: "t".into() });
    let twice = r#"{"__metadata__":{},"__metadata__":{}}"#;
    assert!(matches!(fault_of(&raw(twice, b"")), SafetensorsError::Duplicate { .. }));
    let field = r#"{"t":{"dtype":"F32","dtype":"F16","shape":[1],"data_offsets":[0,4]}}"#;
    assert!(fault_of(&raw(field, b"1234")).to_string().contains("`t`"));
}

#[test]
fn b35_garbage_is_an_error() {
    for header in [
        "",
        " {}",
        "[]",
        "null",
        "{",
        "{} x",
        "\u{80}",
        r#"{"t":null}"#,
        r#"{"t":{}}"#,
        r#"{"t":{"dtype":"F32","shape":[1]}}"#,
        r#"{"t":{"dtype":"F32","shape":[1],"data_offsets":[0,4],"extra":1}}"#,
        r#"{"t":{"dtype":"F32","shape":[1],"data_offsets":[0,4,8]}}"#,
        r#"{"t":{"dtype":"F32","shape":[1],"data_offsets":[-4,0]}}"#,
        r#"{"t":{"dtype":"F32","shape":[1.0],"data_offsets":[0,4]}}"#,
        r#"{"t":{"dtype":"F32","shape":[1],"data_offsets":[0,18446744073709551616]}}"#,
        r#"{"t":{"dtype":1,"shape":[1],"data_offsets":[0,4]}}"#,
        r#"{"t":{"dtype":"F32","shape":[1,1,1,1,1,1,1,1,1],"data_offsets":[0,4]}}"#,
        r#"{"__metadata__":{"x":1}}"#,
        r#"{"__metadata__":[]}"#,
    ] {
        fault_of(&raw(header, b""));
        fault_of(&raw(header, b"1234"));
    }
    fault_of(b"\x80\x04\x95\x0b\x00\x00\x00\x00\x00\x00\x00\x8c\x07payload\x94.");
    fault_of(b"PK\x03\x04\x00\x00\x08\x08\x00\x00\x00\x00archive/data.pkl");
    fault_of(&raw(&String::from_utf8_lossy(&[b'{'; 100_000]), b""));
    let deep = format!(r#"{{"t":{}{}}}"#, "[".repeat(1_000_000), "]".repeat(1_000_000));
    fault_of(&raw(&deep, b""));
    let deep = format!(r#"{{"t":{}"#, r#"{"dtype":"#.repeat(1_000_000));
    fault_of(&raw(&deep, b""));
    let name = "n".repeat(1025);
    assert!(matches!(
        fault_of_entries(&[entry(&name, "F32", "[1]", 0, 4)], 4),
        SafetensorsError::NameTooLong { bytes: 1025, .. }
    ));
}

#[test]
fn b38_too_many_tensors_are_an_error() {
    let names: Vec<String> = (0..=MAX_TENSORS).map(|i| format!("t{i}")).collect();
    let mut tensors: Vec<Tensor<'_>> =
        names.iter().map(|name| (name.as_str(), "F32", &[0][..], &b""[..])).collect();
    assert_eq!(fault_of(&file(&tensors)), SafetensorsError::TooManyTensors { limit: MAX_TENSORS });
    tensors.pop();
    assert_eq!(SafetensorsBytes::new(file(&tensors)).index().unwrap().len(), MAX_TENSORS);
}

#[test]
fn b40_a_file_cut_anywhere_is_truncated_by_name() {
    let bytes = file(&SAMPLE);
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("cut.safetensors");
    for length in 0..bytes.len() {
        std::fs::write(&path, &bytes[..length]).unwrap();
        let fault = SafetensorsFile::at(&path).index().unwrap_err().to_string();
        assert!(fault.contains("truncated") && fault.contains("cut.safetensors"), "{length}: {fault}");
        assert!(fault.contains(&length.to_string()), "{length}: {fault}");
    }
}

#[test]
fn what_is_not_a_regular_file_is_refused() {
    let directory = tempfile::tempdir().unwrap();
    for path in [directory.path(), Path::new("/dev/zero"), &directory.path().join("absent")] {
        assert!(matches!(SafetensorsFile::at(path).index(), Err(SourceError::Io { .. })));
    }
}

#[test]
fn c27_a_file_that_changes_during_the_read_is_an_error() {
    let bytes = file(&SAMPLE);
    let rewritten = file(&[("a", "F32", &[2, 1], b"ABCDEFGH"), SAMPLE[1], SAMPLE[2], SAMPLE[3]]);
    assert_eq!(bytes.len(), rewritten.len());
    type Change<'a> = Box<dyn Fn(&Path) + 'a>;
    let changes: [Change<'_>; 5] = [
        Box::new(|path| {
            let other = path.with_extension("new");
            std::fs::write(&other, &rewritten).unwrap();
            std::fs::rename(other, path).unwrap();
        }),
        Box::new(|path| std::fs::write(path, &rewritten).unwrap()),
        Box::new(|path| std::fs::File::options().write(true).open(path).unwrap().set_len(20).unwrap()),
        Box::new(|path| std::fs::write(path, [&bytes[..], b"more"].concat()).unwrap()),
        Box::new(|path| std::fs::remove_file(path).unwrap()),
    ];
    for (i, change) in changes.iter().enumerate() {
        let (directory, path) = on_disk(&bytes);
        let mut source = SafetensorsFile::at(&path);
        let specs = source.index().unwrap();
        wait_a_tick();
        change(&path);
        let read = (0..specs.len()).try_for_each(|tensor| source.read(tensor, &mut |_| ()));
        let result = read.and_then(|()| source.finish());
        assert!(matches!(result, Err(SourceError::ChangedDuringRead { .. })), "{i}: {result:?}");
        drop(source);
        assert!(!is_open(directory.path()));
    }
}

#[test]
fn c27_every_load_reads_what_the_path_holds_now() {
    let (directory, path) = on_disk(&file(&SAMPLE));
    let mut source = SafetensorsFile::at(&path);
    let first = WeightsDigest::of(&mut source).unwrap();
    assert_eq!(WeightsDigest::of(&mut source).unwrap(), first);
    std::fs::write(&path, file(&[("other", "F16", &[1], b"xy")])).unwrap();
    let tensors = load(&mut source).unwrap();
    assert_eq!((tensors.len(), tensors[0].0.name.as_str()), (1, "other"));
    assert!(!is_open(directory.path()), "no descriptor after finish");
    std::fs::write(&path, b"").unwrap();
    assert!(source.index().is_err());
    assert!(matches!(source.read(0, &mut |_| ()), Err(SourceError::NoSuchTensor { count: 0, .. })));
    assert!(!is_open(directory.path()), "no descriptor after a failed index");
}

/// What a successful parse promises: the tensors fill the data exactly, and known sizes are right.
fn assert_tiles(bytes: &[u8]) {
    let Ok(header) = Header::of_bytes(bytes) else { return };
    let length = u64::from_le_bytes(bytes[..8].try_into().unwrap());
    let mut filled = 8 + length;
    for tensor in &header.tensors {
        assert_eq!(tensor.file_range.begin, filled);
        filled = tensor.file_range.end;
        assert!(filled >= tensor.file_range.begin);
    }
    assert_eq!(filled, bytes.len() as u64);
    if header.tensors.iter().all(|tensor| matches!(tensor.dtype, ElementType::Known(_))) {
        let theirs =
            safetensors::SafeTensors::deserialize(bytes).expect("stricter than the safetensors crate");
        assert_eq!(theirs.len(), header.tensors.len());
        for tensor in &header.tensors {
            let view = theirs.tensor(&tensor.name).unwrap();
            let range = tensor.file_range.begin as usize..tensor.file_range.end as usize;
            assert_eq!(view.data(), &bytes[range]);
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2048))]

    #[test]
    fn edited_files_are_errors_or_describe_exactly_the_data(
        edits in prop::collection::vec(any::<(u8, usize, u8)>(), 0..5),
    ) {
        let mut bytes = file(&SAMPLE);
        edits.into_iter().for_each(|change| edit(&mut bytes, change));
        assert_tiles(&bytes);
        let _ = load(&mut SafetensorsBytes::new(&bytes));
    }

    #[test]
    fn edited_headers_with_a_right_length_are_errors_or_describe_exactly_the_data(
        edits in prop::collection::vec(any::<(u8, usize, u8)>(), 0..4),
    ) {
        let mut text = header(&SAMPLE).into_bytes();
        edits.into_iter().for_each(|change| edit(&mut text, change));
        let bytes = [&(text.len() as u64).to_le_bytes()[..], &text, b"abcdefghuvwxyz01"].concat();
        assert_tiles(&bytes);
    }
}
