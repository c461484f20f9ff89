"""What runs programs: see the table of its packages in docs/design.md."""
