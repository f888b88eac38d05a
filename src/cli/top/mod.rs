//! `kvfs top`: what a mount does, while it is used.
//!
//! A child reads three short files of the mount each second (`sampler`), which are taken apart (`sample`), compared with
//! those of the second before (`rates`), and made into what is shown (`figures`): on a terminal again and again (`watch`,
//! `draw`, `screen`), elsewhere once, or as JSON. Nothing walks through names, and nothing waits for the mount.

mod draw;
mod figures;
mod layout;
mod rates;
mod sample;
mod sampler;
mod screen;
mod watch;
mod words;

use std::collections::VecDeque;
use std::io::{self, ErrorKind, Write};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use clap::Args;
use kvfs_os::mountinfo;
use ratatui::buffer::Buffer;
use ratatui::layout::Rect;
use serde::Serialize;

use super::history::{Event, shown};
use super::interrupt::{self, Interrupts};
use super::output::{Failure, Outcome, Report, json_text, note};
use super::status::{interval, is_mounted};
use super::style::Style;
use draw::View;
use sampler::Sampler;
use watch::Watch;

pub(super) use figures::Figures;
pub(super) use sample::Sample;
pub(super) use sampler::{EVENTS_MAX, Told};
pub(super) use watch::last_event;

pub(crate) use sampler::{SampleArguments, answer};

/// Of a frame that is no terminal's.
const FRAME_COLUMNS: u16 = 80;

const TOP_HELP: &str = "\
Keys: q, Esc and Ctrl-C end it. Rates are those of the last interval; durations of requests are bounds that double, which half of
them and 99 % kept; slow are those that took more than 0.13 s since the mount began. With passthrough the kernel
reads and writes files itself: what is opened is counted. Where standard output is no terminal one frame is printed.
Only root and whoever mounted it may look.

Example: kvfs top /mnt/kv";

/// `kvfs top`.
#[derive(Debug, Args)]
#[command(after_help = TOP_HELP)]
pub(crate) struct TopArguments {
    /// Print one frame as text, of the time between two samples
    #[arg(long)]
    pub once: bool,
    /// Print a line of JSON for each sample, until Ctrl-C or the end of the mount; with --once, one
    #[arg(long)]
    pub json: bool,
    /// How often to look, such as 500ms
    #[arg(long, value_name = "INTERVAL", default_value = "1s", value_parser = interval)]
    pub interval: Duration,
    /// Where the cache is mounted
    pub mountpoint: PathBuf,
}

/// Shows the mount.
pub(crate) fn run(arguments: &TopArguments) -> Outcome {
    let (mount, _) = mountinfo::kvfs_at(&arguments.mountpoint).map_err(Failure::Failed)?;
    let mut source = Source::start(&mount.mountpoint)?;
    let first = source.sample()?;
    if arguments.json && !arguments.once {
        return print_lines(&mut source, first, arguments.interval);
    }
    if arguments.once || arguments.json || !screen::is_there() {
        std::thread::sleep(arguments.interval);
        let second = source.sample()?;
        let figures = Figures::of(Some(&first), &second);
        let events = first.events.into_iter().chain(second.events);
        return if arguments.json {
            line(&figures, &events.collect::<Vec<_>>()).map(Report::text)
        } else {
            Ok(Report::text(frame(figures, events.collect(), &mount.mountpoint)))
        };
    }
    let mut view = view(None, VecDeque::new(), &mount.mountpoint);
    (view.interval, view.style) = (Some(arguments.interval), Style::of_output());
    let mut watch = Watch::new(&mount.mountpoint, source.sampler, first, view);
    if screen::show(&mut watch, arguments.interval)? == screen::Ended::Unmounted {
        say_unmounted(&mount.mountpoint);
    }
    Ok(Report::default())
}

fn say_unmounted(mountpoint: &Path) {
    note(&format!("kvfs: {} was unmounted", shown(mountpoint)));
}

/// Samples that are waited for.
struct Source {
    mountpoint: PathBuf,
    sampler: Sampler,
    last_event: u64,
}

impl Source {
    fn start(mountpoint: &Path) -> Result<Source, Failure> {
        let sampler = Sampler::start(mountpoint).map_err(Failure::failed)?;
        Ok(Source { mountpoint: mountpoint.to_owned(), sampler, last_event: 0 })
    }

    fn sample(&mut self) -> Result<Sample, Failure> {
        let told = self.sampler.ask_and_wait(self.last_event).map_err(|error| {
            Failure::Failed(format!("{}: it cannot be asked: {error}", shown(&self.mountpoint)))
        })?;
        let told = watch::checked(told, &self.mountpoint)?;
        let sample = Sample::of(told, Instant::now());
        self.last_event = watch::last_event(&sample, self.last_event);
        Ok(sample)
    }
}

/// A line of JSON.
#[derive(Serialize)]
struct Json<'a> {
    unix_milliseconds: u64,
    #[serde(flatten)]
    figures: &'a Figures,
    events: &'a [Event],
}

fn line(figures: &Figures, events: &[Event]) -> Result<String, Failure> {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    let unix_milliseconds = u64::try_from(now.as_millis()).unwrap_or(u64::MAX);
    let json = serde_json::to_string(&Json { unix_milliseconds, figures, events });
    Ok(json_text(&(json.map_err(Failure::failed)? + "\n")))
}

/// Prints a line for each sample until somebody wants an end, nobody reads, or the mount is gone.
fn print_lines(source: &mut Source, first: Sample, interval: Duration) -> Outcome {
    let interrupts = Interrupts::hold().map_err(Failure::failed)?;
    let mut before = None;
    let mut now = first;
    loop {
        let text = line(&Figures::of(before.as_ref(), &now), &now.events)?;
        let mut output = io::stdout().lock();
        match output.write_all(text.as_bytes()).and_then(|()| output.flush()) {
            Ok(()) => {}
            Err(error) if error.kind() == ErrorKind::BrokenPipe => break,
            Err(error) => {
                return Err(Failure::Failed(format!("standard output cannot be written: {error}")));
            }
        }
        drop(output);
        let waited = interrupts.wait(interval, &io::stdout()).map_err(Failure::failed)?;
        if waited == interrupt::Ended::Stopped {
            break;
        }
        before = Some(now);
        now = match source.sample() {
            Ok(sample) => sample,
            Err(_) if !is_mounted(&source.mountpoint) => {
                say_unmounted(&source.mountpoint);
                break;
            }
            Err(failure) => return Err(failure),
        };
    }
    Ok(Report::default())
}

fn view(figures: Option<Figures>, events: VecDeque<Event>, mountpoint: &Path) -> View {
    let place = mountpoint.display().to_string();
    let style = Style { is_coloured: false };
    View { place, figures, events, notice: None, interval: None, style }
}

/// One frame as text, with everything in it.
pub(super) fn frame(figures: Figures, events: VecDeque<Event>, mountpoint: &Path) -> String {
    let view = view(Some(figures), events, mountpoint);
    let area = Rect::new(0, 0, FRAME_COLUMNS, view.height(FRAME_COLUMNS));
    let mut buffer = Buffer::empty(area);
    view.draw(area, &mut buffer);
    text_of(&buffer)
}

/// What a buffer shows, without what is empty at the end of its lines.
fn text_of(buffer: &Buffer) -> String {
    let mut text = String::new();
    for y in buffer.area.top()..buffer.area.bottom() {
        let cells = (buffer.area.left()..buffer.area.right()).map(|x| buffer[(x, y)].symbol());
        text.push_str(cells.collect::<String>().trim_end());
        text.push('\n');
    }
    text
}
