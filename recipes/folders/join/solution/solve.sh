#!/bin/bash
cat a.txt b.txt > answer.txt
