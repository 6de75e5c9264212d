//! Tables for people, and the same as JSON.

use std::path::Path;

use serde_json::{Map, Value, json};

use super::{Outcome, machine};

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
    /// Begins with what the machine is.
    pub(crate) fn new() -> Self {
        let mut report = Self(Map::new());
        report.note("cpu", machine::cpu_name());
        report.note("cores", std::thread::available_parallelism().map_or(1, usize::from));
        report
    }

    /// Keeps a value that is in no table.
    pub(crate) fn note(&mut self, key: &str, value: impl Into<Value>) {
        self.0.insert(key.into(), value.into());
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
