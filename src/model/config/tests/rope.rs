//! Rotary frequencies, bit for bit, against the numbers of transformers 4.57.1's own functions, run on numpy
//! float32 with each power rounded once from double precision. (The `powf` of numpy and of torch is up to one
//! unit in the last place off, by platform.)

use super::*;

/// Some frequencies `(pair, value)` and the attention factor.
fn assert_rope(changes: Value, expected: &[(usize, f64)], factor: f64) {
    let config = parse(&without(&["rope_theta"], changes.clone())).unwrap();
    let (frequencies, received) = config.rope_inv_freq();
    assert_eq!(frequencies.len(), config.head_dim / 2);
    assert!((f64::from(received) - factor).abs() < 1e-7, "{changes}: factor {received}");
    for &(pair, value) in expected {
        assert_eq!(frequencies[pair], value as f32, "{changes}: pair {pair}");
    }
}

/// The same scaling in the classic and in the transformers-5 style, theta inside of it.
fn both_styles(theta: f64, head_dim: usize, positions: usize, scaling: Value) -> [Value; 2] {
    let mut modern = scaling;
    modern["rope_theta"] = theta.into();
    let mut classic = modern.clone();
    classic["type"] = classic.as_object_mut().unwrap().remove("rope_type").unwrap();
    [
        json!({"head_dim": head_dim, "max_position_embeddings": positions, "rope_parameters": modern}),
        json!({"head_dim": head_dim, "max_position_embeddings": positions, "rope_scaling": classic}),
    ]
}

fn assert_both(
    (theta, head_dim, positions): (f64, usize, usize),
    scaling: Value,
    expected: &[(usize, f64)],
    factor: f64,
) {
    for changes in both_styles(theta, head_dim, positions, scaling) {
        assert_rope(changes, expected, factor);
    }
}

#[test]
fn default_and_linear() {
    assert_both(
        (1e6, 128, 40_960),
        json!({"rope_type": "default"}),
        &[(1, 0.805_842_220_783_233_6), (21, 0.010_746_078_565_716_743), (63, 1.240_937_763_213_878_5e-6)],
        1.0,
    );
    assert_both(
        (1e4, 128, 4096),
        json!({"rope_type": "linear", "factor": 4.0}),
        &[(0, 0.25), (1, 0.216_491_088_271_141_05), (63, 2.886_954_825_953_580_4e-5)],
        1.0,
    );
    // Theta outside of the scaling, and no scaling at all.
    for text in [
        r#"{"model_type": "llama", "rope_theta": 1000000, "rope_scaling": {"type": "default"}}"#,
        r#"{"model_type": "llama", "rope_theta": 1000000.0, "rope_scaling": null}"#,
        r#"{"model_type": "llama", "rope_theta": 1000000.0, "rope_parameters": {}}"#,
    ] {
        let (frequencies, _) = ModelConfig::from_json(text).unwrap().rope_inv_freq();
        assert_eq!(frequencies[63], 1.240_937_8e-6, "{text}");
    }
}

#[test]
fn llama3() {
    assert_both(
        (5e5, 64, 131_072),
        json!({"rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
               "original_max_position_embeddings": 8192}),
        &[
            (0, 1.0),
            (10, 0.016_560_440_883_040_428),
            (16, 0.000_429_556_705_057_621),
            (19, 1.291_476_746_700_937e-5),
            (31, 9.418_306_490_260_875e-8),
        ],
        1.0,
    );
    assert_both(
        (5e5, 128, 131_072),
        json!({"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
               "original_max_position_embeddings": 8192}),
        &[(32, 0.000_524_846_022_017_300_1), (35, 9.556_212_171_446_532e-5), (63, 3.068_925_877_869_333e-7)],
        1.0,
    );
}

#[test]
fn yarn() {
    // Default beta, original context from max_position_embeddings.
    assert_both(
        (1e6, 128, 32_768),
        json!({"rope_type": "yarn", "factor": 4.0}),
        &[
            (21, 0.010_746_078_565_716_743),
            (32, 0.000_602_941_145_189_106_5),
            (35, 0.000_246_258_394_327_014_7),
            (63, 3.102_344_408_034_696e-7),
        ],
        1.138_629_436_111_989,
    );
    assert_both(
        (1e6, 128, 131_072),
        json!({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768,
               "truncate": false, "beta_fast": 16, "beta_slow": 2}),
        &[
            (32, 0.000_595_679_972_320_795_1),
            (35, 0.000_189_490_194_316_022_1),
            (48, 7.905_693_564_680_405e-6),
        ],
        1.138_629_436_111_989,
    );
    assert_both(
        (1e4, 64, 4096),
        json!({"rope_type": "yarn", "factor": 40.0, "mscale": 0.707, "mscale_all_dim": 1.0}),
        &[(10, 0.056_234_128_773_212_43), (16, 0.005_500_000_435_858_965), (19, 0.001_370_513_462_461_531_2)],
        0.921_042_355_316_339_9,
    );
    // A ramp that ends before it begins.
    assert_both(
        (1e4, 64, 4096),
        json!({"rope_type": "yarn", "factor": 2.0, "attention_factor": 1.25,
               "original_max_position_embeddings": 4}),
        &[(1, 0.749_894_201_755_523_7), (31, 0.000_133_352_150_442_078_8)],
        1.25,
    );
    assert_both(
        (1e4, 16, 64),
        json!({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}),
        &[(0, 1.0), (1, 0.079_056_940_972_805_02), (7, 7.905_694_656_074_047e-5)],
        1.138_629_436_111_989,
    );
    // A null factor is the ratio of the contexts; zeros count as absent.
    assert_both(
        (1e6, 128, 131_072),
        json!({"rope_type": "yarn", "factor": null, "original_max_position_embeddings": 32768,
               "beta_fast": 0, "mscale": 0}),
        &[(32, 0.000_602_941_145_189_106_5)],
        1.138_629_436_111_989,
    );
}

#[test]
fn wrong_scalings_are_errors_that_name_the_field() {
    for (scaling, field) in [
        (json!({"type": "dynamic", "factor": 2.0}), "rope_scaling.type"),
        (json!({"rope_type": "longrope"}), "rope_scaling.rope_type"),
        (json!({"rope_type": "linear", "type": "yarn", "factor": 2.0}), "rope_scaling.type"),
        (json!({"rope_type": "linear"}), "rope_scaling.factor"),
        (json!({"rope_type": "linear", "factor": 0}), "rope_scaling.factor"),
        (json!({"rope_type": "linear", "factor": -2.0}), "rope_scaling.factor"),
        (json!({"rope_type": "linear", "factor": "2"}), "rope_scaling.factor"),
        (json!({"rope_type": "yarn"}), "rope_scaling.factor"),
        (json!({"rope_type": "yarn", "factor": 2, "attention_factor": -1}), "rope_scaling.attention_factor"),
        (json!({"rope_type": "yarn", "factor": 2, "truncate": 1}), "rope_scaling.truncate"),
        (json!({"rope_type": "yarn", "factor": 2, "rope_theta": 1.0}), "rope_theta"),
        (json!({"rope_type": "llama3", "factor": 8.0}), "rope_scaling.low_freq_factor"),
        (
            json!({"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 4, "high_freq_factor": 4}),
            "rope_scaling.high_freq_factor",
        ),
        (json!({"full_attention": {"rope_type": "default"}}), "rope_scaling.full_attention"),
        (
            json!({"rope_type": "default", "partial_rotary_factor": 0.25}),
            "rope_scaling.partial_rotary_factor",
        ),
        (json!({"rope_type": "default", "rope_theta": 5.0}), "rope_scaling.rope_theta"),
    ] {
        let fault =
            parse(&with(json!({"rope_scaling": scaling}))).expect_err(&scaling.to_string()).to_string();
        assert!(fault.contains(field), "{scaling}: {fault}");
    }
    let both = json!({"rope_scaling": {"type": "linear", "factor": 2.0},
                      "rope_parameters": {"rope_type": "default"}});
    assert!(matches!(parse(&with(both)), Err(ConfigError::Contradiction { .. })));
}
