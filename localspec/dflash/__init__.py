"""The DFlash format: what a drafter's file must hold, and whether it fits a target."""
