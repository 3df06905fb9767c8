"""The layout and the colours, which are the terminal's own: light ones stay light, and sixteen are enough."""

from __future__ import annotations

CSS = """
Screen { background: ansi_default; color: ansi_default; layout: vertical; }
#title, #titles, #heading, #log-heading, #keys { height: 1; }
#runs { height: 3fr; min-height: 3; }
#middle { height: 4fr; min-height: 5; }
#curves { width: 2fr; height: 100%; }
#facts { width: 3fr; height: 100%; scrollbar-size-vertical: 1; background: ansi_default; }
#facts Static { width: 100%; height: auto; }
#log { height: 3fr; min-height: 3; }
* { scrollbar-color: ansi_cyan; scrollbar-color-hover: ansi_cyan; scrollbar-color-active: ansi_cyan;
    scrollbar-background: ansi_default; scrollbar-background-hover: ansi_default;
    scrollbar-background-active: ansi_default; scrollbar-corner-color: ansi_default; }
#keys { text-wrap: nowrap; text-overflow: ellipsis; }
#typing { display: none; height: 1; }
#prompt { width: auto; text-style: bold; }
#input { width: 1fr; height: 1; border: none; }
.-typing #typing { display: block; }
.-typing #keys { display: none; }
.-whole #titles, .-whole #runs { display: none; }
.-whole #middle { height: 3fr; }
.-whole #log { height: 1fr; }
Help, Question { align: center middle; background: transparent; }
.box { width: 76; max-width: 100%; height: auto; max-height: 100%; padding: 1 2; border: round ansi_cyan;
       background: ansi_default; color: ansi_default; }
.help { padding: 0 1; width: 78; scrollbar-size-vertical: 1; }
#question { width: 100%; height: auto; }
#answers { height: 1; margin-top: 1; }
#answers Button { width: auto; height: 1; border: none; margin-right: 4; background: ansi_default;
                  color: ansi_default; text-style: none; }
#answers Button:focus { text-style: reverse bold; }
"""
