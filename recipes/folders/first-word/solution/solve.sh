#!/bin/bash
cut -d' ' -f1 notes.txt > answer.txt
