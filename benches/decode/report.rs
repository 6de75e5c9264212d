//! Tables for people, and the same as JSON.

use std::path::Path;

use dormouse::{Awake, Engine};
use serde_json::{Map, Value, json};

use super::generation::Costs;
use super::{Options, Outcome, machine};

/// One entry of a table.
#[derive(Debug)]
pub(crate) enum Cell {
    Text(String),
    /// A value and its decimals.
    Number(f64, usize),
    Nothing,
}

impl From<&str> for Cell {
    fn from(text: &str) -> Self {
        Self::Text(text.into())
    }
}

impl Cell {
    fn text(&self) -> String {
        match self {
            Self::Text(text) => text.clone(),
            Self::Number(value, decimals) => format!("{value:.decimals$}"),
            Self::Nothing => String::new(),
        }
    }

    fn json(&self) -> Value {
        match self {
            Self::Text(text) => json!(text),
            Self::Number(value, _) => json!(value),
            Self::Nothing => Value::Null,
        }
    }
}

/// All that was measured.
#[derive(Debug)]
pub(crate) struct Report(Map<String, Value>);

impl Report {
    pub(crate) fn new(options: &Options) -> Self {
        let mut all = Map::new();
        all.insert("cpu".into(), json!(machine::cpu_name()));
        all.insert("cores".into(), json!(std::thread::available_parallelism().map_or(1, usize::from)));
        all.insert("threads".into(), json!(options.threads));
        all.insert("simd".into(), json!(machine::simd_name(options.simd)));
        all.insert("model".into(), json!(options.model));
        all.insert("short".into(), json!(options.short));
        Self(all)
    }

    pub(crate) fn set_limit(&mut self, gb_per_s: f64) {
        self.0.insert("read_limit_gb_per_s".into(), json!(gb_per_s));
    }

    pub(crate) fn print_head(&self) {
        let get = |key| match self.0.get(key) {
            Some(Value::String(text)) => text.clone(),
            value => value.map(Value::to_string).unwrap_or_default(),
        };
        println!("{} on {} threads ({} cores), {}", get("cpu"), get("threads"), get("cores"), get("simd"));
        let limit = self.0.get("read_limit_gb_per_s").and_then(Value::as_f64).unwrap_or_default();
        println!("memory is read at {limit:.1} GB/s (a buffer larger than the caches, all threads)");
    }

    pub(crate) fn set_model(&mut self, engine: &Engine<Awake>, costs: &Costs) {
        let megabytes = costs.step_bytes as f64 / 1e6;
        self.0.insert("step_bytes".into(), json!(costs.step_bytes));
        let (family, layers) = (engine.config().family(), engine.config().num_layers());
        let model = self.0.get("model").and_then(Value::as_str).unwrap_or_default();
        println!("{model}: {family:?}, {layers} layers, a step reads {megabytes:.1} MB of weights");
    }

    /// Prints a table and keeps it under `key`, each row as an object of its columns.
    pub(crate) fn table(&mut self, key: &str, title: &str, columns: &[&str], rows: &[Vec<Cell>]) {
        println!("\n{title}");
        let texts: Vec<Vec<String>> = rows.iter().map(|row| row.iter().map(Cell::text).collect()).collect();
        let width = |column: usize| {
            let cells = texts.iter().map(|row| row[column].chars().count());
            cells.chain([columns[column].chars().count()]).max().unwrap_or(0)
        };
        let widths: Vec<usize> = (0..columns.len()).map(width).collect();
        let print = |cells: &mut dyn Iterator<Item = &str>| {
            let mut line = String::new();
            for (index, (cell, &width)) in cells.zip(&widths).enumerate() {
                // The first column names the row; the others are numbers.
                line += &if index == 0 { format!("  {cell:<width$}") } else { format!("  {cell:>width$}") };
            }
            println!("{}", line.trim_end());
        };
        print(&mut columns.iter().copied());
        texts.iter().for_each(|row| print(&mut row.iter().map(String::as_str)));
        let object = |row: &Vec<Cell>| {
            let cells = columns.iter().zip(row).map(|(&column, cell)| (column.to_owned(), cell.json()));
            Value::Object(cells.collect())
        };
        self.0.insert(key.into(), rows.iter().map(object).collect());
    }

    pub(crate) fn save(&self, path: &Path) -> Outcome {
        Ok(std::fs::write(path, serde_json::to_string_pretty(&self.0)? + "\n")?)
    }
}
