//! Memory that hostile weight files can make the engine allocate. A process of its own: what is measured is
//! the peak of the whole process.

use dormouse::{Checkpoint, SafetensorsFile, WeightSource};

/// Peak of resident memory so far, in KiB.
fn peak_kib() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").expect("Linux");
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).expect("a peak");
    line.trim().trim_end_matches(" kB").parse().expect("a number")
}

#[test]
fn b38_memory_stays_below_64_mib_over_the_baseline() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("model.safetensors");
    // Written piece by piece, so that making the files doesn't raise the peak.
    let write = |length: u64, pieces: &mut dyn Iterator<Item = String>| {
        use std::io::Write as _;
        let mut file = std::io::BufWriter::new(std::fs::File::create(&path).unwrap());
        file.write_all(&length.to_le_bytes()).unwrap();
        let written: u64 = pieces
            .map(|piece| {
                file.write_all(piece.as_bytes()).unwrap();
                piece.len() as u64
            })
            .sum();
        file.into_inner().unwrap().set_len(8 + written.max(length.min(3 << 30))).unwrap();
    };
    let baseline = peak_kib();
    let mut refused = 0;
    let mut check = |expect: &str| {
        for source in
            [&mut SafetensorsFile::at(&path) as &mut dyn WeightSource, &mut Checkpoint::at(directory.path())]
        {
            let listed = source.index();
            assert_eq!(listed.is_err(), !expect.is_empty(), "{listed:?}");
            refused += usize::from(listed.is_err_and(|fault| fault.to_string().contains(expect)));
            let grown = peak_kib() - baseline;
            assert!(grown < 64 << 10, "{expect}: {grown} KiB");
        }
    };
    for length in [u64::MAX, 2 << 30, (24 << 20) + 1] {
        write(length, &mut std::iter::empty());
        check("header of");
    }
    write(24 << 20, &mut std::iter::empty());
    check("not a JSON object");
    // The most that is accepted: as many tensors as there may be, in a full header.
    let entry = |i: u32, name: &str| {
        let comma = if i == 0 { '{' } else { ',' };
        format!(r#"{comma}"{i:07}{name}":{{"dtype":"F32","shape":[0,1,1,1],"data_offsets":[0,0]}}"#)
    };
    let name = "n".repeat((24 << 20) / (1 << 17) - entry(1, "").len() - 1);
    let last = [String::from("}")];
    let text = || (0..1 << 17).map(|i| entry(i, &name)).chain(last.clone());
    let length = text().map(|piece| piece.len() as u64).sum();
    write(length, &mut text());
    check("");
    let many = || (0..300_000).map(|i| entry(i, "")).chain(last.clone());
    let length = many().map(|piece| piece.len() as u64).sum();
    write(length, &mut many());
    check("more than");
    assert_eq!(refused, 10);
}
