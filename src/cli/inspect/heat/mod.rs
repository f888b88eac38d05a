//! `kvfs inspect --heat`: what K and V of a page look like, head by head, and what rounding would cost.

mod drawing;
mod figures;

use std::fmt::Write as _;
use std::io::BufWriter;
use std::path::{Path, PathBuf};

use clap::{Args, ValueEnum};
use serde_json::{Map, Value, json};

use crate::cli::history::shown;
use crate::cli::new_file::{NewFile, begin, explain};
use crate::cli::output::{Failure, short};
use crate::cli::page_values::{Away, PageValues, Part};
use crate::cli::picture;
use figures::{PartFigures, not_rounded, percent};

/// What is asked of a picture.
#[derive(Debug, Default, Args)]
pub(crate) struct HeatArguments {
    /// Draw K and V of a page or a tail into FILE, a picture in PNG
    #[arg(long, value_name = "FILE.png")]
    heat: Option<PathBuf>,
    /// Draw only one of them
    #[arg(long, value_enum, requires = "heat")]
    part: Option<PartArgument>,
    /// Replace FILE if it is there
    #[arg(long, requires = "heat")]
    force: bool,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum PartArgument {
    K,
    V,
}

impl HeatArguments {
    /// Makes the file, without its name yet; `None` where no picture is asked for.
    pub(super) fn begin(&self) -> Result<Option<Picture>, Failure> {
        let Some(name) = &self.heat else { return Ok(None) };
        if name == Path::new("-") {
            let why = "--heat -: a picture is written to a file: name one, such as page.png";
            return Err(Failure::Usage(why.to_owned()));
        }
        let part = self.part.map(|part| match part {
            PartArgument::K => Part::K,
            PartArgument::V => Part::V,
        });
        Ok(Some(Picture { file: begin(name, self.force)?, name: name.clone(), part }))
    }
}

/// A picture to be.
#[derive(Debug)]
pub(super) struct Picture {
    file: NewFile,
    name: PathBuf,
    /// The only part that is drawn.
    part: Option<Part>,
}

/// A picture that was made, in words.
#[derive(Debug)]
pub(super) struct Drawn {
    pub(super) json: Value,
    pub(super) file: String,
    /// A line for each head.
    pub(super) table: String,
}

impl Picture {
    pub(super) fn draw(self, page: &Path) -> Result<Drawn, Failure> {
        let values = PageValues::read(page, Away::Refuse)?;
        let wanted = |part: &Part| self.part.is_none_or(|only| only == *part);
        let parts: Vec<_> =
            values.parts().filter(wanted).map(|part| PartFigures::of(&values, part)).collect();
        if parts.is_empty() {
            return Err(Failure::Failed(format!("{}: its model keeps no V", shown(page))));
        }
        let canvas = drawing::draw(&values, &parts);
        let mut out = BufWriter::new(self.file.file());
        let written =
            picture::write(&canvas, &mut out).and_then(|()| std::io::Write::flush(&mut out));
        drop(out);
        written.and_then(|()| self.file.publish()).map_err(|error| explain(&self.name, &error))?;
        Ok(Drawn {
            json: as_json(&self.name, &parts),
            file: shown(&self.name),
            table: table(&parts),
        })
    }
}

fn as_json(name: &Path, parts: &[PartFigures]) -> Value {
    let mut object = Map::new();
    object.insert("file".to_owned(), json!(name.display().to_string()));
    for part in parts {
        let heads = part.heads.iter().map(|head| {
            let [q8_0, q4_0] = head.errors.map(Result::ok);
            json!({
                "largest": head.largest,
                "not_finite": head.not_finite,
                "norms": head.norms,
                "outlier_channels": head.outliers,
                "error_q8_0": q8_0,
                "error_q4_0": q4_0,
            })
        });
        object.insert(part.part.name().to_owned(), heads.collect());
    }
    Value::Object(object)
}

fn table(parts: &[PartFigures]) -> String {
    let mut text =
        "part head  largest  norms               q8_0 error  q4_0 error  outlier channels\n"
            .to_owned();
    let mut notes = Vec::new();
    for part in parts {
        for (number, head) in part.heads.iter().enumerate() {
            let (least, most) = head.norm_ends();
            let norms = format!("{} to {}", short(least), short(most));
            let [q8_0, q4_0] = head.errors.map(|error| error.map_or("-".to_owned(), percent));
            // Writing to a String cannot fail.
            let _ = writeln!(
                text,
                "{:<4} {number:>4}  {:<7}  {norms:<18}  {q8_0:<10}  {q4_0:<10}  {}",
                part.part.name(),
                short(head.largest.into()),
                in_short(&head.outliers),
            );
            notes.extend(head.errors.iter().filter_map(|error| error.err()).map(not_rounded));
        }
        let not_finite: u64 = part.heads.iter().map(|head| head.not_finite).sum();
        if not_finite > 0 {
            let _ = writeln!(text, "{}: {not_finite} values are NaN or infinite", part.part.name());
        }
    }
    notes.sort_unstable();
    notes.dedup();
    for note in notes {
        let _ = writeln!(text, "-: {note}");
    }
    text
}

/// The first of the numbers.
fn in_short(numbers: &[usize]) -> String {
    const SHOWN: usize = 8;
    let first: Vec<_> = numbers.iter().take(SHOWN).map(usize::to_string).collect();
    match numbers.len() {
        0 => "none".to_owned(),
        count if count > SHOWN => format!("{} and {} more", first.join(" "), count - SHOWN),
        _ => first.join(" "),
    }
}

#[cfg(test)]
mod tests;
