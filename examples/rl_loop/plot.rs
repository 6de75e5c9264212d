//! The reward of each step as an SVG file.

use std::fmt::Write;

const WIDTH: f32 = 720.0;
const HEIGHT: f32 = 400.0;
const MARGIN: f32 = 50.0;

/// Writes a line plot of `rewards`, from 0 to 1.
pub fn write_svg(path: &str, rewards: &[f32]) -> std::io::Result<()> {
    let x = |step: usize| MARGIN + (WIDTH - 2.0 * MARGIN) * step as f32 / (rewards.len().max(2) - 1) as f32;
    let y = |reward: f32| HEIGHT - MARGIN - (HEIGHT - 2.0 * MARGIN) * reward;
    let mut grid = String::new();
    for tenth in (0..=10).step_by(2) {
        let (reward, y) = (tenth as f32 / 10.0, y(tenth as f32 / 10.0));
        let (left, right) = (MARGIN, WIDTH - MARGIN);
        let _ = writeln!(grid, r##"<line x1="{left}" y1="{y}" x2="{right}" y2="{y}" stroke="#ddd"/>"##);
        let (x, y) = (left - 8.0, y + 4.0);
        let _ = writeln!(grid, r##"<text x="{x}" y="{y}" text-anchor="end">{reward:.1}</text>"##);
    }
    let mut points = String::new();
    for (step, &reward) in rewards.iter().enumerate() {
        let _ = write!(points, "{:.1},{:.1} ", x(step), y(reward));
    }
    let (middle, bottom, last) = (WIDTH / 2.0, HEIGHT - 12.0, rewards.len().saturating_sub(1));
    let svg = format!(
        r##"<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{HEIGHT}"
    font-family="sans-serif" font-size="12">
<rect width="100%" height="100%" fill="white"/>
{grid}<polyline points="{points}" fill="none" stroke="#2a6fb0" stroke-width="2"/>
<text x="{middle}" y="24" text-anchor="middle" font-size="15">mean reward of the population</text>
<text x="{middle}" y="{bottom}" text-anchor="middle">step (0 to {last})</text>
</svg>
"##
    );
    if let Some(parent) = std::path::Path::new(path).parent() {
        std::fs::create_dir_all(parent)?;
    }
    std::fs::write(path, svg)
}
