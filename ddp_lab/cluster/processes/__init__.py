"""Where ranks run and who starts them, here and on other hosts."""
